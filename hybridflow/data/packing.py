"""Plans that decide which sequences share a micro-batch and which rank gets which sequence. Pure numpy: lengths in, index arrays out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from hybridflow.errors import ConfigError

Lengths = np.ndarray | Sequence[int]
Costs = np.ndarray | Sequence[float]


def pack(lengths: Lengths, max_tokens: int, *, min_bins: int = 1, multiple_of: int = 1) -> list[np.ndarray]:
    """Groups sequences into micro-batches of at most `max_tokens` tokens.

    Every index appears in exactly one bin, no bin is empty and none exceeds the budget. First-fit decreasing decides how many bins are
    needed: at most 11/9 of the optimum plus 6/9. That number is raised to `min_bins`, then to a multiple of `multiple_of`, as far as
    there are sequences to fill the bins. Lengths are evened out over the bins when that stays within the budget. Deterministic.

    Args:
        lengths: tokens of each sequence [B], positive.
        max_tokens: budget of one bin.
        min_bins: fewest bins wanted. With fewer than `min_bins` sequences there is one bin a sequence.
        multiple_of: the number of bins is made a multiple of this; when the B sequences are too few for the next multiple it stays what
            the budget and `min_bins` ask for.

    Returns:
        Index arrays int64, ascending inside a bin; bins in order of their smallest index. Empty when there are no sequences.

    Raises:
        ConfigError: one sequence alone exceeds the budget.
        ValueError: a length or argument is not positive.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if max_tokens < 1 or min_bins < 1 or multiple_of < 1 or (sizes < 1).any():
        raise ValueError(f"lengths, max_tokens, min_bins and multiple_of must be positive, got {max_tokens}, {min_bins}, {multiple_of}")
    if len(sizes) == 0:
        return []
    longest = int(sizes.argmax())
    if sizes[longest] > max_tokens:
        raise ConfigError(
            f"sequence {longest} has {sizes[longest]} tokens, more than the {max_tokens} of one micro-batch: raise "
            "actor.max_tokens_per_micro_batch or lower data.max_prompt_length + data.max_response_length"
        )
    bin_of = _first_fit_decreasing(sizes, max_tokens)
    needed = int(bin_of.max()) + 1
    wanted = _round_bins(needed, len(sizes), min_bins, multiple_of)
    even = balance(sizes, wanted)
    if all(sizes[members].sum() <= max_tokens for members in even):
        return _ordered(even)
    return _ordered(_split_to([np.flatnonzero(bin_of == b) for b in range(needed)], sizes, wanted))


def balance(costs: Costs, num_ranks: int) -> list[np.ndarray]:
    """Spreads items over ranks so that the largest sum of costs is small. Counts may differ between ranks.

    Longest processing time first: the dearest remaining item goes to the cheapest rank (ties: fewer items, then lower rank). The
    largest sum is at most 4/3 - 1/(3 num_ranks) of the optimum, and at most the mean plus the dearest item. Deterministic.

    Args:
        costs: cost of each item [B], finite and not negative; any unit.
        num_ranks: number of groups, at least 1.

    Returns:
        One ascending int64 index array a rank; every index once. Empty arrays only when there are fewer items than ranks.

    Raises:
        ValueError: num_ranks is not positive, or a cost is negative or not finite.
    """
    weights = np.asarray(costs, dtype=np.float64)
    if num_ranks < 1 or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"costs must be finite and not negative and num_ranks positive, got num_ranks {num_ranks}")
    owner = np.empty(len(weights), dtype=np.int64)
    heap = [(0.0, 0, rank) for rank in range(num_ranks)]
    for item in np.argsort(-weights, kind="stable").tolist():
        load, count, rank = heap[0]
        owner[item] = rank
        heapq.heapreplace(heap, (load + float(weights[item]), count + 1, rank))
    return [np.flatnonzero(owner == rank) for rank in range(num_ranks)]


def _first_fit_decreasing(sizes: np.ndarray, max_tokens: int) -> np.ndarray:
    """Bin number of each sequence [B]: longest first, each into the first bin with room."""
    room = np.full(len(sizes), max_tokens, dtype=np.int64)
    bin_of = np.empty(len(sizes), dtype=np.int64)
    used = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        chosen = int(np.argmax(room[: used + 1] >= sizes[item]))  # bin `used` is still empty, so there always is one
        bin_of[item] = chosen
        room[chosen] -= sizes[item]
        used = max(used, chosen + 1)
    return bin_of


def _round_bins(needed: int, num_sequences: int, min_bins: int, multiple_of: int) -> int:
    """The number of bins to aim for, between `needed` and `num_sequences`."""
    floor = max(needed, min(min_bins, num_sequences))
    rounded = -(-floor // multiple_of) * multiple_of
    return rounded if rounded <= num_sequences else floor


def _split_to(bins: list[np.ndarray], sizes: np.ndarray, wanted: int) -> list[np.ndarray]:
    """Halves the fullest bin that holds two sequences or more until there are `wanted` bins; no bin grows."""
    while len(bins) < wanted:
        tokens = [int(sizes[members].sum()) if len(members) > 1 else 0 for members in bins]
        members = bins.pop(int(np.argmax(tokens)))
        bins += [members[half] for half in balance(sizes[members], 2)]
    return bins


def _ordered(bins: list[np.ndarray]) -> list[np.ndarray]:
    return sorted(bins, key=lambda members: int(members[0]))
