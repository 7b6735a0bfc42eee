"""Block-wise fp8, written out plainly for whole tensors, and streams in one process whose result is
compared with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch

from hybridflow.models.fp8 import BlockQuantisation
from hybridflow.reshard.layout import Catalog, Layout
from hybridflow.reshard.slices import SlicePlan
from hybridflow.sync.messages import Message, Messages
from hybridflow.sync.schedule import Schedule
from hybridflow.sync.staging import ReceiveStaging, SendStaging
from hybridflow.sync.stream import receive_stream, send_stream
from tests.unit.reshard import reshard_cases as cases

Tensors = dict[str, torch.Tensor]


def quantise(weight: np.ndarray, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn `[r, c]`, float32 scales) block after block, as DeepSeek's `weight_quant` does
    it, with 1 for a block of zeros."""
    rows, columns = block
    shape = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scales = np.ones(shape, dtype=np.float32)
    scaled = np.zeros(weight.shape, dtype=np.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            largest = np.abs(weight[place]).max()
            if largest > 0:
                scales[i, j] = np.float32(largest) / np.float32(448)
            scaled[place] = weight[place] / scales[i, j]
    return torch.from_numpy(scaled).to(torch.float8_e4m3fn), torch.from_numpy(scales)


def forms_of(
    weights: Mapping[str, np.ndarray], quantisation: BlockQuantisation
) -> dict[str, Tensors]:
    """{"plain", "fp8"}: every tensor as it is, and the quantised ones with their scales."""
    plain = {name: torch.from_numpy(value) for name, value in weights.items()}
    fp8: Tensors = {}
    for name, value in weights.items():
        if quantisation.covers(name, value.shape):
            fp8[name], fp8[f"{name}_scale_inv"] = quantise(value, quantisation.block)
    return {"plain": plain, "fp8": fp8}


def engine_buffers(
    layout: Layout, catalog: Catalog, forms: Mapping[str, Tensors] | None
) -> list[Tensors]:
    """Every engine rank's buffers, cut from the whole tensors' forms; of bytes 0x7f (NaN in fp8)
    where None is given. Padding is zero."""
    held = []
    for number in layout.rank_class.tolist():
        rank = layout.classes[number]
        mine = {
            name: torch.full(
                (*shape[:-1], shape[-1] * getattr(torch, dtype).itemsize), 0x7F, dtype=torch.uint8
            ).view(getattr(torch, dtype))
            for name, shape, dtype in zip(
                rank.names, rank.shapes.tolist(), rank.dtypes, strict=True
            )
        }
        for row, tensor in enumerate(rank.tensor.tolist()):
            target = mine[rank.names[int(rank.buffer[row])]]
            place = tuple(
                slice(s, s + n)
                for s, n in zip(rank.local[row].tolist(), rank.size[row].tolist(), strict=True)
            )
            if tensor < 0:
                target[place] = 0
            elif forms is not None:
                name = catalog.names[tensor]
                in_fp8 = target.dtype == torch.float8_e4m3fn or name not in forms["plain"]
                value = forms["fp8" if in_fp8 else "plain"][name].reshape(
                    tuple(catalog.shapes[tensor].tolist())
                )
                part = tuple(
                    slice(s, s + n)
                    for s, n in zip(rank.start[row].tolist(), rank.size[row].tolist(), strict=True)
                )
                target[place] = value[part].to(target.dtype)
        held.append(mine)
    return held


def stream(
    plan: SlicePlan,
    trainers: Sequence[Tensors],
    engines: Sequence[Tensors],
    staged: bool,
    part_bytes: int = 0,
) -> int:
    """Carry the plan out with what runs in a job, schedules through JSON included; returns the
    bytes that travelled."""
    messages = Messages(plan, part_bytes)
    mail = cases.Mail()
    sent = 0
    for rank, buffers in enumerate(trainers):
        mine = _posted(plan.source, rank, messages.outgoing(rank))
        sent += send_stream(mine, buffers, cases.Post(mail, rank), SendStaging(rank)).payload_bytes
    for rank, buffers in enumerate(engines):
        mine = _posted(plan.target, rank, messages.incoming(rank))
        assert all(item.blocks is None for message in mine for item in message.items), (
            "a receiver is to compute"
        )
        receive_stream(mine, cases.Post(mail, rank), ReceiveStaging(rank), staged, buffers).commit(
            buffers
        )
    assert not mail
    return sent


def _posted(side: Layout, rank: int, messages: list[Message]) -> tuple[Message, ...]:
    schedule = Schedule("plan", side.classes[int(side.rank_class[rank])], tuple(messages))
    read = Schedule.from_dict(
        json.loads(json.dumps({**schedule.to_dict(), "messages": [asdict(m) for m in messages]}))
    ).messages
    assert read == tuple(messages)
    return read


def assert_equal(want: Sequence[Tensors], got: Sequence[Tensors]) -> None:
    """Bit for bit."""
    for rank, (expected, found) in enumerate(zip(want, got, strict=True)):
        for name, value in expected.items():
            same = torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))
            assert same, (
                f"rank {rank} {name}: {int((found[name].float() != value.float()).sum())} of "
                f"{value.numel()} differ"
            )
