"""Packing plans, which assign sequences to micro-batches and ranks. Pure numpy.

Every plan depends only on the lengths (or costs) and their positions, so all ranks compute the same
plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from hybridflow.data.balancing import Costs, balance, checked_costs
from hybridflow.errors import ConfigError

Lengths = np.ndarray | Sequence[int]


def pack(lengths: Lengths, max_tokens: int, *, min_bins: int = 1) -> list[np.ndarray]:
    """Group sequences into micro-batches of at most `max_tokens` tokens.

    Every index appears in exactly one bin, no bin is empty and none exceeds the budget. Best-fit
    decreasing determines the number of bins: at most 11/9 of the optimum plus 6/9. That number is
    raised to `min_bins` if there are enough sequences. Bins are balanced if that stays within the
    budget. Deterministic.

    Args:
        lengths: tokens of each sequence [B], positive.
        max_tokens: budget of one bin.
        min_bins: minimum number of bins. With fewer than `min_bins` sequences there is one bin per
            sequence.

    Returns:
        One sorted int64 index array per bin; bins are ordered by their smallest index. Empty if
        there are no sequences.

    Raises:
        ConfigError: a single sequence exceeds the budget.
        ValueError: a length or argument is not positive.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if max_tokens < 1 or min_bins < 1 or (sizes < 1).any():
        raise ValueError(
            f"lengths, max_tokens and min_bins must be positive, got {max_tokens}, {min_bins}"
        )
    if len(sizes) == 0:
        return []
    longest = int(sizes.argmax())
    if sizes[longest] > max_tokens:
        raise ConfigError(
            f"sequence {longest} has {sizes[longest]} tokens, but a micro-batch is limited to "
            f"{max_tokens}; raise actor.max_tokens_per_micro_batch or lower "
            "data.max_prompt_length + data.max_response_length"
        )
    bin_of = _best_fit_decreasing(sizes, max_tokens)
    needed = int(bin_of.max()) + 1
    wanted = max(needed, min(min_bins, len(sizes)))
    even = balance(sizes, wanted)
    if all(sizes[members].sum() <= max_tokens for members in even):
        return _ordered(even)
    return _ordered(_split_to([np.flatnonzero(bin_of == b) for b in range(needed)], sizes, wanted))


def pack_alike(
    lengths: Lengths, max_tokens: int, largest: Callable[[int], int]
) -> list[np.ndarray]:
    """Pack this rank's sequences into as many micro-batches as the rank that needs the most.

    A rank that needs fewer gets empty micro-batches at the end, so that it still participates in
    every collective. Each rank sees only its own mini-batch, so the ranks use a collective to agree
    on the number.

    Args:
        lengths, max_tokens: this rank's arguments for `pack`.
        largest: returns the maximum of a number across the ranks (an all-reduce); every rank calls
            it once.
    """
    bins = pack(lengths, max_tokens)
    wanted = largest(len(bins))
    if len(bins) < wanted:
        bins = pack(lengths, max_tokens, min_bins=wanted)
    return bins + [np.zeros(0, np.int64)] * (wanted - len(bins))


def balanced_order(costs: Costs, num_ranks: int) -> np.ndarray:
    """Return a permutation of the rows [B] such that splitting it into `num_ranks` consecutive
    pieces (`Dispatch.DP`) gives pieces of about equal cost.

    Each piece has ceil(B / num_ranks) rows; if B is not divisible by `num_ranks`, the cheapest rows
    go to the short piece after the full ones. No full piece costs more than the mean of the full
    pieces plus the most expensive row. Within a piece, rows keep their original order.
    """
    weights = checked_costs(costs)
    size = -(-len(weights) // num_ranks)
    if not size:
        return np.zeros(0, np.int64)
    whole = len(weights) // size
    costliest_first = np.argsort(-weights, kind="stable")
    full = np.sort(costliest_first[: whole * size])
    short = np.sort(costliest_first[whole * size :])
    groups = balance(weights[full], whole, equal_counts=True)
    return np.concatenate(
        [*(full[members] for members in sorted(groups, key=lambda members: int(members[0]))), short]
    )


def update_order(
    costs: Costs, num_ranks: int, rows_per_update: int, seed: Sequence[int]
) -> np.ndarray:
    """Return the order of rows [B] for the updates of one epoch. The consecutive piece of each
    data-parallel rank contains its share of the first update, then of the second, and so on.

    Which rows an update uses depends only on `seed`; they are then divided among the ranks at about
    equal cost. The sequence of mini-batches is therefore the same in any layout.

    Raises:
        ValueError: B is not divisible by `rows_per_update`, or `rows_per_update` is not divisible
            by `num_ranks`.
    """
    weights = checked_costs(costs)
    if len(weights) % rows_per_update or rows_per_update % num_ranks:
        raise ValueError(
            f"{len(weights)} rows cannot be split into updates of {rows_per_update} rows, each "
            f"divided evenly among {num_ranks} ranks"
        )
    drawn = np.random.default_rng(list(seed)).permutation(len(weights)).reshape(-1, rows_per_update)
    shares = []
    for rows in drawn:
        shares.append(rows[balanced_order(weights[rows], num_ranks)].reshape(num_ranks, -1))
    return np.concatenate([np.zeros((num_ranks, 0), np.int64), *shares], axis=1).reshape(-1)


def _best_fit_decreasing(sizes: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the bin number of each sequence [B]. Sequences are placed longest first, each into the
    fullest bin with enough room."""
    bin_of = np.empty(len(sizes), dtype=np.int64)
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    used = 0
    tokens = sizes.tolist()
    for item in np.argsort(-sizes, kind="stable").tolist():
        at = bisect_left(rooms, (tokens[item], -1))
        if at == len(rooms):
            room = max_tokens
            chosen = used
            used += 1
        else:
            room, chosen = rooms.pop(at)
        bin_of[item] = chosen
        insort(rooms, (room - tokens[item], chosen))
    return bin_of


def _split_to(bins: list[np.ndarray], sizes: np.ndarray, wanted: int) -> list[np.ndarray]:
    """Split the fullest bin with at least two sequences until there are `wanted` bins. No bin
    grows."""
    while len(bins) < wanted:
        tokens = []
        for members in bins:
            tokens.append(int(sizes[members].sum()) if len(members) > 1 else 0)
        members = bins.pop(int(np.argmax(tokens)))
        bins += [members[half] for half in balance(sizes[members], 2)]
    return bins


def _ordered(bins: list[np.ndarray]) -> list[np.ndarray]:
    return sorted(bins, key=lambda members: int(members[0]))
