"""Packed micro-batches: the tokens read from each sample (`lengths_read`), concatenated without
padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.algorithms.vocab_parallel import Support
from hybridflow.batch import DataProto
from hybridflow.data.packing import (
    RESPONSE_MASK,
    counted_tokens,
    lengths_read,
    ranges,
    supports_of,
    tokens_read,
    values_of,
)


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass. t packed tokens, n response tokens that enter the loss, s samples.

    Attributes:
        samples: rows of the batch [s], in packed order.
        tokens, positions: [1, t]; positions restart at each sample.
        segments: [t] index of each token's sample within the micro-batch.
        predict_rows: [n] rows whose outputs predict the response tokens.
        targets: [n] the response tokens that they predict.
        lengths: [s] number of targets in each sample.
        columns: per-response-token columns [n, ...] (old_log_probs, advantages, ...).
        support: sampling support of each of the n targets, if the batch has it.
    """

    samples: np.ndarray
    tokens: Tensor
    positions: Tensor
    segments: Tensor
    predict_rows: Tensor
    targets: Tensor
    lengths: Tensor
    columns: Mapping[str, Tensor]
    support: Support | None = None

    def mask(self) -> Tensor:
        """Return the attention mask [1, 1, t, t]: a token attends to itself and to earlier tokens
        of its sample."""
        same = self.segments[:, None] == self.segments[None, :]
        return same.tril()[None, None]


def build_micro_batches(
    batch: DataProto, bins: Sequence[np.ndarray], columns: Sequence[str], device: torch.device
) -> list[MicroBatch]:
    """Pack the samples of each bin.

    Args:
        batch: the rows, with prompt_ids and response_ids.
        bins: rows of each micro-batch; may be empty (a rank without samples still takes part in
            collectives).
        columns: jagged per-response-token columns to include. If they include `response_mask`,
            tokens that the policy did not sample serve only as context.
        device: the device of the tensors.
    """
    packed: list[MicroBatch] = []
    for rows in bins:
        packed.append(_pack(batch, np.asarray(rows, dtype=np.int64), columns, device))
    return packed


def _pack(
    batch: DataProto, rows: np.ndarray, columns: Sequence[str], device: torch.device
) -> MicroBatch:
    prompts = batch.jagged("prompt_ids").take(rows)
    responses = batch.jagged("response_ids").take(rows)
    keep, counts = counted_tokens(batch, rows, columns)
    sizes = lengths_read(prompts.lengths + responses.lengths)
    starts = np.cumsum(sizes) - sizes
    used = int(sizes.sum())
    total = max(1, used)  # at least one token: a model cannot run on an empty input
    tokens, positions, segments = (np.zeros(total, np.int64) for _ in range(3))
    tokens[:used] = tokens_read(prompts, responses, sizes)
    predict_rows = ranges(starts + prompts.lengths - 1, responses.lengths)[keep]
    positions[:used] = np.arange(used) - np.repeat(starts, sizes)
    segments[:used] = np.repeat(np.arange(len(rows)), sizes)

    def there(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(values)).to(device)

    targets = np.array(responses.values[keep], dtype=np.int64)
    supports = supports_of(batch, rows, keep)
    return MicroBatch(
        samples=rows,
        tokens=there(tokens)[None],
        positions=there(positions)[None],
        segments=there(segments),
        predict_rows=there(predict_rows),
        targets=there(targets),
        lengths=there(counts),
        columns={
            name: there(values_of(batch, name, rows, keep))
            for name in columns
            if name != RESPONSE_MASK
        },
        support=None
        if supports is None
        else Support.of(supports, targets, lambda one: one.to(device)),
    )
