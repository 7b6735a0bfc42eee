"""Packing and unpacking of micro-batches, shared by all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hybridflow.batch import SUPPORT, SUPPORT_IDS, SUPPORT_SIZES, DataProto, Jagged, Supports

if TYPE_CHECKING:
    import torch


RESPONSE_MASK = "response_mask"  # jagged bool: response tokens that the policy sampled


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
