"""Plans that decide which sequences share a micro-batch and which rank gets which sequence. Pure
numpy: lengths in, index arrays out.

Every plan depends on the lengths (or costs) and their positions alone: not on a dictionary's order,
nor on which rank asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from hybridflow.data.balancing import Costs, balance, checked_costs
from hybridflow.errors import ConfigError

Lengths = np.ndarray | Sequence[int]


def pack(lengths: Lengths, max_tokens: int, *, min_bins: int = 1) -> list[np.ndarray]:
    """Groups sequences into micro-batches of at most `max_tokens` tokens.

    Every index appears in exactly one bin, no bin is empty and none exceeds the budget. Best-fit
    decreasing decides how many bins are needed: at most 11/9 of the optimum plus 6/9. That number
    is raised to `min_bins`, as far as there are sequences to fill the bins. Lengths are evened out
    over the bins when that stays within the budget. Deterministic.

    Args:
        lengths: tokens of each sequence [B], positive.
        max_tokens: budget of one bin.
        min_bins: fewest bins wanted. With fewer than `min_bins` sequences there is one bin a
            sequence.

    Returns:
        Index arrays int64, ascending inside a bin; bins in order of their smallest index. Empty
        when there are no sequences.

    Raises:
        ConfigError: one sequence alone exceeds the budget.
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
            f"sequence {longest} has {sizes[longest]} tokens, more than the {max_tokens} of one "
            "micro-batch: raise actor.max_tokens_per_micro_batch or lower data.max_prompt_length + "
            "data.max_response_length"
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
    """`pack` on one of several ranks, with the same number of micro-batches on each: the largest
    that any of them needs.

    A rank with fewer sequences than that gets empty micro-batches at the end, so that it still
    takes part in every collective. Ranks settle the number among themselves, because only they know
    what their mini-batches hold.

    Args:
        lengths, max_tokens: as for `pack`, of this rank.
        largest: of a number given by each rank, the largest; every rank calls it once.
    """
    bins = pack(lengths, max_tokens)
    wanted = largest(len(bins))
    if len(bins) < wanted:
        bins = pack(lengths, max_tokens, min_bins=wanted)
    return bins + [np.zeros(0, np.int64)] * (wanted - len(bins))


def balanced_order(costs: Costs, num_ranks: int) -> np.ndarray:
    """The order [B] of rows in which the consecutive pieces that `num_ranks` ranks get
    (`Dispatch.DP`) cost about the same.

    Pieces hold B / num_ranks rows, rounded up; where that does not divide, the cheapest rows fill
    the short piece after the whole ones. A whole piece costs at most the mean of the whole pieces
    plus the costliest row. Inside a piece rows keep their order.
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
    """The order [B] of rows for the updates of one epoch: the consecutive piece of each
    data-parallel rank holds its share of the first update, then of the second, and so on.

    The rows of an update are drawn from the whole batch, by `seed` alone, and divided over the
    ranks afterwards at about equal cost: a run in any layout trains on the same sequence of
    mini-batches.

    Raises:
        ValueError: the B rows do not divide into updates, or an update does not divide over the
            ranks.
    """
    weights = checked_costs(costs)
    if len(weights) % rows_per_update or rows_per_update % num_ranks:
        raise ValueError(
            f"{len(weights)} rows, {rows_per_update} an update, do not divide over {num_ranks} "
            "ranks"
        )
    drawn = np.random.default_rng(list(seed)).permutation(len(weights)).reshape(-1, rows_per_update)
    shares = []
    for rows in drawn:
        shares.append(rows[balanced_order(weights[rows], num_ranks)].reshape(num_ranks, -1))
    return np.concatenate([np.zeros((num_ranks, 0), np.int64), *shares], axis=1).reshape(-1)


def _best_fit_decreasing(sizes: np.ndarray, max_tokens: int) -> np.ndarray:
    """Bin number of each sequence [B]: longest first, each into the bin where it leaves the least
    room."""
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
    """Halves the fullest bin that holds two sequences or more until there are `wanted` bins; no bin
    grows."""
    while len(bins) < wanted:
        tokens = [int(sizes[members].sum()) if len(members) > 1 else 0 for members in bins]
        members = bins.pop(int(np.argmax(tokens)))
        bins += [members[half] for half in balance(sizes[members], 2)]
    return bins


def _ordered(bins: list[np.ndarray]) -> list[np.ndarray]:
    return sorted(bins, key=lambda members: int(members[0]))
