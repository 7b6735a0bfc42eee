"""Micro-batches of packed sequences: prompt and response of each sample one after another, no padding between samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.parallel import device
from hybridflow.protocol import DataProto, Jagged


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass. t packed tokens, n response tokens, s samples.

    Attributes:
        samples: rows of the batch, in packed order.
        tokens, positions: [1, t].
        packed: segment bounds for Megatron; the padding tail is a segment of its own.
        predict_rows: [n] row whose logits predict each response token.
        targets: [n] the response tokens.
        lengths: [s] response length of each sample.
        columns: per-response-token columns [n] (old_log_probs, advantages, ...).
    """

    samples: np.ndarray
    tokens: torch.Tensor
    positions: torch.Tensor
    packed: PackedSeqParams
    predict_rows: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor
    columns: Mapping[str, torch.Tensor]


def sequence_lengths(batch: DataProto) -> np.ndarray:
    """[B] prompt plus response tokens."""
    return np.asarray(batch.jagged("prompt_ids").lengths + batch.jagged("response_ids").lengths)


def build_micro_batches(batch: DataProto, bins: Sequence[np.ndarray], columns: Sequence[str], multiple_of: int) -> list[MicroBatch]:
    """Pack the samples of each bin; all micro-batches get one length, so pipeline stages know the shape of what they receive.

    Args:
        bins: rows of each micro-batch; may be empty (a rank that ran out of samples still takes part in collectives).
        columns: jagged per-response-token columns to bring along.
        multiple_of: the length is rounded up to it (sequence parallelism cuts it by the tensor-parallel size).
    """
    lengths = sequence_lengths(batch)
    longest = max((int(lengths[rows].sum()) for rows in bins), default=0)
    total = max(multiple_of, -(-longest // multiple_of) * multiple_of)
    return [_pack(batch, np.asarray(rows, dtype=np.int64), lengths, columns, total) for rows in bins]


def _pack(batch: DataProto, rows: np.ndarray, lengths: np.ndarray, columns: Sequence[str], total: int) -> MicroBatch:
    prompts, responses = batch.jagged("prompt_ids").take(rows), batch.jagged("response_ids").take(rows)
    bounds = np.concatenate([[0], np.cumsum(lengths[rows])]).astype(np.int64)
    tokens, positions = np.zeros(total, np.int64), np.arange(total, dtype=np.int64)
    starts = bounds[:-1]
    tokens[_ranges(starts, prompts.lengths)] = prompts.values
    response_rows = _ranges(starts + prompts.lengths, responses.lengths)
    tokens[response_rows] = responses.values
    if bounds[-1] < total:
        bounds = np.append(bounds, total)
    positions -= np.repeat(bounds[:-1], np.diff(bounds))
    here = device()
    cu_seqlens = torch.from_numpy(bounds.astype(np.int32)).to(here)
    longest = int(np.diff(bounds).max())
    # max_seqlen is the longest *segment*: rope_utils.py:203 reads positions from it, and would not restart them at each segment
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return MicroBatch(
        samples=rows,
        tokens=torch.from_numpy(tokens)[None].to(here),
        positions=torch.from_numpy(positions)[None].to(here),
        packed=packed,
        predict_rows=torch.from_numpy(response_rows - 1).to(here),
        targets=torch.from_numpy(np.array(responses.values, dtype=np.int64)).to(here),
        lengths=torch.from_numpy(np.array(responses.lengths)).to(here),
        columns={name: torch.from_numpy(np.array(batch.jagged(name).take(rows).values, dtype=np.float32)).to(here) for name in columns},
    )


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The concatenation of arange(start, start + length)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)


def unpack(values_per_micro: Sequence[np.ndarray], micro_batches: Sequence[MicroBatch], num_samples: int) -> Jagged:
    """Per-response-token results of all micro-batches as one jagged column in the order of the batch."""
    rows: list[np.ndarray] = [np.zeros(0, np.float32)] * num_samples
    for values, micro in zip(values_per_micro, micro_batches, strict=True):
        parts = np.split(values, np.cumsum(micro.lengths.cpu().numpy())[:-1])
        for sample, part in zip(micro.samples.tolist(), parts, strict=True):
            rows[sample] = part
    return Jagged.from_rows(rows, np.float32)
