"""Packing of rows into micro-batches: the plan, which assigns sequences to micro-batches and ranks,
and the columns of the packed rows. Pure numpy, shared by all backends.

Every plan depends only on the lengths (or costs) and their positions, so all ranks compute the same
plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hybridflow.batch import (
    SUPPORT,
    SUPPORT_IDS,
    SUPPORT_SIZES,
    DataProto,
    Jagged,
    Supports,
)
from hybridflow.data.balancing import Costs, balance, checked_costs
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    import torch


Lengths = np.ndarray | Sequence[int]
RESPONSE_MASK = "response_mask"  # jagged bool: response tokens that the policy sampled


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
    if num_ranks == 1:
        return np.arange(len(weights))
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


class Packed(Protocol):
    """The part of a packed micro-batch that `unpack` needs."""

    @property
    def samples(self) -> np.ndarray:
        """Indices of the packed rows in the batch [s], in packed order."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """Number of participating response tokens per row [s]."""
        ...


def sequence_lengths(batch: DataProto) -> np.ndarray:
    """Return the number of tokens (prompt plus response) in each row [B]."""
    return np.asarray(batch.jagged("prompt_ids").lengths + batch.jagged("response_ids").lengths)


def lengths_read(lengths: np.ndarray, last_token: bool = False) -> np.ndarray:
    """For each row, return how many leading tokens a forward pass reads [B].

    Nothing is predicted from the last token, so it is read only if `last_token` is set. A one-token
    row is always read, because attention kernels reject empty sequences.
    """
    return lengths if last_token else np.maximum(lengths - 1, np.minimum(lengths, 1))


def tokens_read(prompts: Jagged, responses: Jagged, read: np.ndarray) -> np.ndarray:
    """Concatenate the leading tokens (prompt, then response) of each row; `read` [s] is the number
    per row. Returns int64 [sum of read]."""
    sizes = prompts.lengths + responses.lengths
    starts = np.cumsum(sizes) - sizes
    tokens = np.zeros(int(sizes.sum()), np.int64)
    tokens[ranges(starts, prompts.lengths)] = prompts.values
    tokens[ranges(starts + prompts.lengths, responses.lengths)] = responses.values
    return tokens[ranges(starts, read)]


def check_token_ids(batch: DataProto, vocab_size: int) -> None:
    """Reject token ids outside the model's vocabulary before the batch is copied to the device.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    for name in ("prompt_ids", "response_ids", *([SUPPORT_IDS] if SUPPORT_IDS in batch else [])):
        ids = batch.jagged(name).values
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise ValueError(
                f"{name} contains token {wrong}, but the model's token ids are 0 to "
                f"{vocab_size - 1}. Prepare the data with the trained model's tokenizer, and use "
                "the same tokenizer in the engine"
            )


def counted_tokens(
    batch: DataProto, rows: np.ndarray, columns: Sequence[str]
) -> tuple[np.ndarray | slice, np.ndarray]:
    """Return a mask of the participating response tokens of these rows, and their number per row
    [s].

    If `columns` contains `response_mask`, only sampled tokens participate; losses, metrics and
    counts ignore all others. If the batch lacks that column, every token counts as sampled.
    """
    if RESPONSE_MASK not in columns or RESPONSE_MASK not in batch:
        return slice(None), np.asarray(batch.jagged("response_ids").take(rows).lengths)
    mask = batch.jagged(RESPONSE_MASK).take(rows)
    before = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    return mask.values, np.diff(before[mask.offsets])


def values_of(
    batch: DataProto, name: str, rows: np.ndarray, keep: np.ndarray | slice
) -> np.ndarray:
    """Return the values of a jagged column for the participating tokens of these rows, [n, ...]
    int64 or float32."""
    values = batch.jagged(name).take(rows).values[keep]
    return np.array(
        values, dtype=np.int64 if np.issubdtype(values.dtype, np.integer) else np.float32
    )


def supports_of(batch: DataProto, rows: np.ndarray, keep: np.ndarray | slice) -> Supports | None:
    """Return the sampler's supports for the participating tokens of these rows, or None if the
    batch has no supports.

    Raises:
        ValueError: in some row, the number of support tokens does not match the support sizes.
    """
    if not all(name in batch for name in SUPPORT):
        return None
    sizes = batch.jagged(SUPPORT_SIZES).take(rows)
    ids = batch.jagged(SUPPORT_IDS).take(rows)
    before = np.concatenate([[0], np.cumsum(sizes.values, dtype=np.int64)])
    if len(wrong := np.flatnonzero(np.diff(before[sizes.offsets]) != ids.lengths)):
        row = int(wrong[0])
        raise ValueError(
            f"row {rows[row]}: {SUPPORT_IDS} has {ids.lengths[row]} tokens, but {SUPPORT_SIZES} "
            f"sums to {np.diff(before[sizes.offsets])[row]}"
        )
    return Supports(sizes.values, ids.values).take(keep)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenation of arange(start, start + length) for all pairs (start, length)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)


def unpack(
    values_per_micro: Sequence[np.ndarray],
    micro_batches: Sequence[Packed],
    num_samples: int,
    dtype: type = np.float32,
) -> Jagged:
    """Combine the per-response-token results [n, ...] of all micro-batches into one jagged column
    in batch order."""
    tail = values_per_micro[0].shape[1:]
    rows: list[np.ndarray] = [np.zeros((0, *tail), dtype)] * num_samples
    for values, micro in zip(values_per_micro, micro_batches, strict=True):
        parts = np.split(values, np.cumsum(micro.lengths.cpu().numpy()))[
            :-1
        ]  # split at the end too: a micro-batch may be empty
        for sample, part in zip(micro.samples.tolist(), parts, strict=True):
            rows[sample] = part
    return Jagged.from_rows(rows, dtype)


def sampled_tokens(batch: DataProto) -> np.ndarray:
    """Return the number of unmasked sampled tokens in each response, [B]."""
    mask = batch.jagged(RESPONSE_MASK)
    sums = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    return sums[mask.offsets[1:]] - sums[mask.offsets[:-1]]


def without_rows(batch: DataProto, left_out: np.ndarray) -> DataProto:
    """Clear the response mask of the rows selected by `left_out`, [B] bool."""
    mask = batch.jagged(RESPONSE_MASK)
    kept = mask.values & ~np.repeat(left_out, mask.lengths)
    return batch.with_columns(**{RESPONSE_MASK: Jagged(kept, mask.offsets)})
