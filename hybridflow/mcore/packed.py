"""Packed micro-batches: samples are concatenated without padding between them.

`lengths_read` determines how many tokens are read from each sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.algorithms.vocab_parallel import Support
from hybridflow.batch import DataProto
from hybridflow.data.image_tokens import GRIDS, PIXELS, ImageTokens
from hybridflow.data.packing import (
    RESPONSE_MASK,
    counted_tokens,
    lengths_read,
    ranges,
    sequence_lengths,
    supports_of,
    tokens_read,
    values_of,
)
from hybridflow.device.platform import Platform
from hybridflow.mcore.ahead import Ahead, PackedRows
from hybridflow.mcore.parallel import ZigZag
from hybridflow.mcore.vision import Images


@dataclass(frozen=True)
class Cut:
    """How micro-batches are sharded across ranks.

    Attributes:
        segment_multiple: each sequence is padded to a multiple of this (2 x context ranks).
        multiple: each micro-batch is padded to a multiple of this, because sequence parallelism
            splits a rank's tokens across tensor ranks.
        rank, size: rank and size of the context-parallel group.
    """

    segment_multiple: int = 1
    multiple: int = 1
    rank: int = 0
    size: int = 1

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Return the lengths of a micro-batch's sequences, including padding."""
        return -(-lengths // self.segment_multiple) * self.segment_multiple

    def total(self, lengths: np.ndarray, bins: Sequence[np.ndarray]) -> int:
        """Return the length to which all micro-batches are padded: the length of the longest one,
        rounded up.
        """
        longest = max((int(self.padded(lengths[rows]).sum()) for rows in bins), default=0)
        return max(self.multiple, -(-longest // self.multiple) * self.multiple)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one packed forward pass. It has t packed tokens, n response tokens that enter
    the loss, and s samples; this context rank processes t' of the tokens and makes n' of the
    predictions.

    Attributes:
        samples: rows of the batch, in packed order.
        length: t, the same for all micro-batches, so that pipeline stages know the shape to
            receive.
        tokens, positions: [1, t'].
        packed: bounds of the whole segments (over all context ranks) for Megatron; the padding tail
            is a separate segment. `packed.bounds` is a copy on the CPU; `packed.real` [t'] is False
            at padding tokens of this rank (`ExpertLoad`). If some of the samples have images,
            `packed.images` contains the `Images`, and `packed.axes` [3, t] the positions on three
            axes; otherwise both are None.
        predict_rows: [n'] this rank's rows whose outputs predict the response tokens.
        targets: [n'] the response tokens that they predict.
        places: [n'] indices of the targets among the n response tokens; None without context
            parallelism (all, in order).
        lengths: [s] number of response tokens (out of n) in each sample.
        num_targets: n, known on the host; summing `lengths` would force a device sync.
        columns: per-response-token columns [n, ...] (old_log_probs, advantages, ...).
        support: sampling support of each of the n' targets, if the batch has it.
        ahead: inputs and targets of the multi-token-prediction heads, by depth.
    """

    samples: np.ndarray
    length: int
    tokens: Tensor
    positions: Tensor
    packed: PackedSeqParams
    predict_rows: Tensor
    targets: Tensor
    places: Tensor | None
    lengths: Tensor
    num_targets: int
    columns: Mapping[str, Tensor]
    support: Support | None = None
    ahead: tuple[Ahead, ...] = ()


def build_micro_batches(
    batch: DataProto,
    bins: Sequence[np.ndarray],
    columns: Sequence[str],
    cut: Cut,
    total: int | None = None,
    last_token: bool = False,
    heads: int = 0,
    images: ImageTokens | None = None,
) -> list[MicroBatch]:
    """Pack the samples of each bin.

    Args:
        batch: the rows, with prompt_ids and response_ids.
        bins: rows of each micro-batch; may be empty (a rank without samples still takes part in
            collectives).
        columns: jagged per-response-token columns to include. If they include `response_mask`,
            tokens that the policy did not sample serve only as context.
        cut: sharding over ranks.
        total: length of every micro-batch; None for `cut.total`.
        last_token: True if the model also reads each sample's last token (see `lengths_read`).
        heads: number of multi-token-prediction heads to prepare inputs for.
        images: how the model reads images, if the batch has any.
    """
    read = lengths_read(sequence_lengths(batch), last_token)
    length = cut.total(read, bins) if total is None else total
    packed: list[MicroBatch] = []
    for rows in bins:
        index = np.asarray(rows, dtype=np.int64)
        micro = _pack(batch, index, read, columns, cut, length, heads)
        if images is not None and GRIDS in batch:
            _add_images(micro, batch, read, images)
        packed.append(micro)
    return packed


def _pack(
    batch: DataProto,
    rows: np.ndarray,
    read: np.ndarray,
    columns: Sequence[str],
    cut: Cut,
    total: int,
    heads: int,
) -> MicroBatch:
    prompts = batch.jagged("prompt_ids").take(rows)
    responses = batch.jagged("response_ids").take(rows)
    keep, counts = counted_tokens(batch, rows, columns)
    read = read[rows]
    bounds = np.concatenate([[0], np.cumsum(cut.padded(read))]).astype(np.int64)
    starts = bounds[:-1]
    filled = ranges(starts, read)
    tokens = np.zeros(total, np.int64)
    tokens[filled] = tokens_read(prompts, responses, read)
    real = np.zeros(total, bool)
    real[filled] = True
    predicting = ranges(starts + prompts.lengths - 1, responses.lengths)
    predict_rows = predicting[keep]
    if bounds[-1] < total:
        bounds = np.append(bounds, total)
    positions = np.arange(total, dtype=np.int64) - np.repeat(bounds[:-1], np.diff(bounds))
    layout = ZigZag.of(bounds, cut.size)
    mine = layout.rows_of(cut.rank)
    places = np.flatnonzero(layout.owner[predict_rows] == cut.rank)
    targets = np.array(responses.values[keep], dtype=np.int64)[places]
    supports = supports_of(batch, rows, keep)
    upload = Platform.detect().upload

    def there(values: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(values))

    sampled = np.zeros(len(predicting), bool)
    sampled[keep] = True
    whole = PackedRows(
        tokens, starts, read, predicting, responses.values, responses.lengths, sampled
    )
    return MicroBatch(
        samples=rows,
        length=total,
        tokens=there(tokens[mine])[None],
        positions=there(positions[mine])[None],
        packed=_segments(bounds, real[mine]),
        predict_rows=there(layout.local[predict_rows[places]]),
        targets=there(targets),
        places=there(places) if cut.size > 1 else None,
        lengths=there(np.array(counts)),
        num_targets=int(np.sum(counts)),
        columns={
            name: there(values_of(batch, name, rows, keep))
            for name in columns
            if name != RESPONSE_MASK
        },
        support=None if supports is None else Support.of(supports.take(places), targets, upload),
        ahead=tuple(whole.ahead(depth, layout, cut.rank, upload) for depth in range(1, heads + 1)),
    )


def _segments(bounds: np.ndarray, real: np.ndarray) -> PackedSeqParams:
    upload = Platform.detect().upload
    cu_seqlens = upload(torch.from_numpy(bounds.astype(np.int32)))
    longest = int(np.diff(bounds).max())
    # max_seqlen must be the longest *segment*: rope_utils.py:203 derives positions from it, and
    # would not restart them at each segment
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    packed.bounds, packed.real = torch.from_numpy(bounds), upload(torch.from_numpy(real))
    packed.images = packed.axes = None
    return packed


def _add_images(micro: MicroBatch, batch: DataProto, read: np.ndarray, images: ImageTokens) -> None:
    """Add the samples' images and positions on three axes. Requires a context-parallel size of 1,
    because a rank must have all tokens.
    """
    grids = batch.jagged(GRIDS).take(micro.samples)
    if not len(grids.values):
        return
    bounds = micro.packed.bounds.numpy()
    # padding counts from zero too
    axes = np.tile(np.arange(micro.length) - np.repeat(bounds[:-1], np.diff(bounds)), (3, 1))
    places = []
    for number, row in enumerate(micro.samples.tolist()):
        start = int(bounds[number])
        length = int(read[row])
        own = grids.row(number)
        if not len(own):
            continue
        found = images.places(batch.jagged("prompt_ids").row(row), own)
        axes[:, start : start + length] = images.axes(length, found, own)
        places.append(start + found)
    pixels = np.array(batch.jagged(PIXELS).take(micro.samples).values, np.float32)
    upload = Platform.detect().upload
    micro.packed.axes = upload(torch.from_numpy(axes))
    micro.packed.images = Images(
        upload(torch.from_numpy(pixels)),
        upload(torch.from_numpy(np.array(grids.values, np.int64))),
        upload(torch.from_numpy(np.concatenate(places).astype(np.int64))),
    )
