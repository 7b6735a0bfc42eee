"""What packing and unpacking micro-batches has in common, whatever backend runs them. Numbers in,
numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hybridflow.batch import SUPPORT, SUPPORT_IDS, SUPPORT_SIZES, DataProto, Jagged, Supports

if TYPE_CHECKING:
    import torch


RESPONSE_MASK = "response_mask"  # jagged bool: which response tokens the policy sampled


class Packed(Protocol):
    """A packed micro-batch, as far as its results are taken apart."""

    @property
    def samples(self) -> np.ndarray:
        """Rows of the batch [s], in packed order."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """[s] response tokens of each, those that take part."""
        ...


def sequence_lengths(batch: DataProto) -> np.ndarray:
    """[B] prompt plus response tokens."""
    return np.asarray(batch.jagged("prompt_ids").lengths + batch.jagged("response_ids").lengths)


def lengths_read(lengths: np.ndarray, last_token: bool = False) -> np.ndarray:
    """[B] how many tokens of rows of so many tokens a forward pass reads, from the first on.

    Nothing is predicted from a row's last token, so it is read only where `last_token` says that
    its own output is wanted. A row of one token keeps it: attention kernels do not take empty
    sequences.
    """
    return lengths if last_token else np.maximum(lengths - 1, np.minimum(lengths, 1))


def tokens_read(prompts: Jagged, responses: Jagged, read: np.ndarray) -> np.ndarray:
    """[sum of read] the first `read` [s] tokens of each row, prompt and response, one row after
    another."""
    sizes = prompts.lengths + responses.lengths
    starts = np.cumsum(sizes) - sizes
    tokens = np.zeros(int(sizes.sum()), np.int64)
    tokens[ranges(starts, prompts.lengths)] = prompts.values
    tokens[ranges(starts + prompts.lengths, responses.lengths)] = responses.values
    return tokens[ranges(starts, read)]


def check_token_ids(batch: DataProto, vocab_size: int) -> None:
    """Refuse token ids that a model does not have, while they are still on the host.

    Raises:
        ValueError: there is one; names the column and the id.
    """
    for name in ("prompt_ids", "response_ids", *([SUPPORT_IDS] if SUPPORT_IDS in batch else [])):
        ids = batch.jagged(name).values
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise ValueError(
                f"{name} has the token {wrong}; the model has the tokens 0 to {vocab_size - 1}. "
                "Prepare the data with, and let the engine use, the tokenizer of the model that is "
                "trained"
            )


def counted_tokens(
    batch: DataProto, rows: np.ndarray, columns: Sequence[str]
) -> tuple[np.ndarray | slice, np.ndarray]:
    """Which response tokens of these rows take part, and how many of each row [s].

    Where `columns` asks for `response_mask`, only those that the policy sampled: no loss, metric or
    count sees others. A batch without that column counts as sampled throughout.
    """
    if RESPONSE_MASK not in columns or RESPONSE_MASK not in batch:
        return slice(None), np.asarray(batch.jagged("response_ids").take(rows).lengths)
    mask = batch.jagged(RESPONSE_MASK).take(rows)
    before = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    return mask.values, np.diff(before[mask.offsets])


def values_of(
    batch: DataProto, name: str, rows: np.ndarray, keep: np.ndarray | slice
) -> np.ndarray:
    """[n, ...] values of a column at the tokens of these rows that take part, int64 or float32."""
    values = batch.jagged(name).take(rows).values[keep]
    return np.array(
        values, dtype=np.int64 if np.issubdtype(values.dtype, np.integer) else np.float32
    )


def supports_of(batch: DataProto, rows: np.ndarray, keep: np.ndarray | slice) -> Supports | None:
    """The sampler's supports of the tokens of these rows that take part; None for a batch without
    them.

    Raises:
        ValueError: a row has more or fewer tokens in its supports than their sizes say.
    """
    if not all(name in batch for name in SUPPORT):
        return None
    sizes = batch.jagged(SUPPORT_SIZES).take(rows)
    ids = batch.jagged(SUPPORT_IDS).take(rows)
    before = np.concatenate([[0], np.cumsum(sizes.values, dtype=np.int64)])
    if len(wrong := np.flatnonzero(np.diff(before[sizes.offsets]) != ids.lengths)):
        row = int(wrong[0])
        raise ValueError(
            f"{SUPPORT_IDS} of row {rows[row]} has {ids.lengths[row]} tokens, and {SUPPORT_SIZES} "
            f"add up to {np.diff(before[sizes.offsets])[row]}"
        )
    return Supports(sizes.values, ids.values).take(keep)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The concatenation of arange(start, start + length)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)


def unpack(
    values_per_micro: Sequence[np.ndarray],
    micro_batches: Sequence[Packed],
    num_samples: int,
    dtype: type = np.float32,
) -> Jagged:
    """Per-response-token results [n, ...] of all micro-batches as one jagged column in the order of
    the batch."""
    tail = values_per_micro[0].shape[1:]
    rows: list[np.ndarray] = [np.zeros((0, *tail), dtype)] * num_samples
    for values, micro in zip(values_per_micro, micro_batches, strict=True):
        parts = np.split(values, np.cumsum(micro.lengths.cpu().numpy()))[
            :-1
        ]  # cut at the end too: a micro-batch may hold no sample
        for sample, part in zip(micro.samples.tolist(), parts, strict=True):
            rows[sample] = part
    return Jagged.from_rows(rows, dtype)
