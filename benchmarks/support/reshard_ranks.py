"""Ranks for the weight-transfer benchmark, which perform syncs and bare sends of the same bytes."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.device.platform import Platform
from hybridflow.models import family_of
from hybridflow.models.layout import ParallelShape
from hybridflow.process.rendezvous import client_store, master_store
from hybridflow.process.torch_store import TorchStore
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import PADDING, Catalog, Layout, megatron_layout
from hybridflow.reshard.planner import make_plan
from hybridflow.sync.messages import Messages
from hybridflow.sync.staging import ReceiveStaging, SendStaging, largest_message
from hybridflow.sync.stream import receive_stream, send_stream
from hybridflow.sync.transports import open_receiver, open_sender, part_bytes
from hybridflow.sync.transports.base import Endpoint

HOST = "127.0.0.1"
DTYPE = "bfloat16"
BARE_BYTES = 16 << 20  # per bare message


class Ranks:
    """A rank with a plan and buffers for all sides of a comparison.

    Args:
        rank: index among trainer and engine ranks; the trainer's come first.
        hf: fields of the model's config.json.
        trainer: sizes of the Megatron layout.
        engine: sizes of the only engine.
        port: port of the store that rank 0 opens.
        staging: bytes per bucket.
        transports: transports that `sync` can use. Each has an in-place and a staged session.
    """

    def __init__(
        self,
        rank: int,
        hf: Mapping[str, Any],
        trainer: ParallelShape,
        engine: EngineShape,
        port: int,
        staging: int,
        transports: Sequence[str],
    ) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        family = family_of(hf)
        source = megatron_layout(family, trainer.coordinates(), DTYPE)
        target = engine_layout(family, [engine], DTYPE)
        self.plan = make_plan(Catalog.of(family.tensors()), source, target, staging)
        self.rank = rank
        self.port = port
        self.trainers = trainer.ranks
        self.is_trainer = rank < self.trainers
        self.engine = rank - self.trainers
        self.store = (
            master_store(HOST, port, 60) if rank == 0 else client_store(HOST, port, 60)
        )
        layout = self.plan.source if self.is_trainer else self.plan.target
        number = rank if self.is_trainer else self.engine
        self.live = make_buffers(self.plan.catalog, layout, number)
        world = self.trainers + self.plan.target.num_ranks
        bare_store = TorchStore(self.store, "bare/")
        self.bare_group = dist.ProcessGroupGloo(
            bare_store, rank, world, timedelta(seconds=60)
        )
        self.bare_memory: dict[int, torch.Tensor] = {}
        self.sides = {
            key: self._open(*key) for key in product(transports, (False, True))
        }

    def _open(self, transport: str, staged: bool) -> tuple[Any, Any, Any]:
        """Return the messages, channel and staging buffers of a session, using the trainer's
        sizes."""
        messages = Messages(self.plan, part_bytes(transport, Platform("cpu")))
        engines = range(self.plan.target.num_ranks)
        arriving = [messages.incoming(rank) for rank in engines]
        largest = max(largest_message(one) for one in arriving)
        slots = min(8, max(2, self.plan.bucket_bytes * 2 // largest))
        if staged and transport == "shared_memory":
            senders = [Counter(message.peer for message in one) for one in arriving]
            slots = 1 + max(max(counts.values()) for counts in senders)
        endpoint = Endpoint(
            transport,
            f"{transport}, {staged}",
            HOST,
            self.port,
            tuple(range(self.trainers)),
            tuple(engines),
            largest,
            60.0,
            slots=slots,
        )
        if self.is_trainer:
            channel = open_sender(endpoint, self.rank)
            return messages.outgoing(self.rank), channel, SendStaging(self.rank, slots)
        channel = open_receiver(endpoint, self.engine)
        return (
            messages.incoming(self.engine),
            channel,
            ReceiveStaging(self.engine, slots),
        )

    def sync(self, transport: str, staged: bool) -> tuple[int, float]:
        """Sync once. Returns the number of bytes that this rank moved and the duration of its
        commit in seconds."""
        messages, channel, staging = self.sides[transport, staged]
        if self.is_trainer:
            return send_stream(messages, self.live, channel, staging).payload_bytes, 0.0
        received = receive_stream(messages, channel, staging, staged, self.live)
        return received.stats.payload_bytes, received.commit(self.live)

    def cpu(self) -> float:
        """Return the number of CPU seconds that this rank has used."""
        return time.process_time()

    def forget(self) -> None:
        """Overwrite an engine rank's weights with wrong values."""
        if not self.is_trainer:
            for values in self.live.values():
                values.zero_()

    def check(self) -> bool:
        """Return True if all elements in the buffers of an engine rank are correct."""
        if self.is_trainer:
            return True
        expected = make_buffers(self.plan.catalog, self.plan.target, self.engine)
        return all(
            torch.equal(self.live[name], values) for name, values in expected.items()
        )

    def bare(self, transport: str) -> None:
        """Send the bytes of every pair over gloo, using memory of the same size as the weights.
        This is the limit for `transport`."""
        if not self.bare_memory:
            amounts: Counter[int] = Counter()
            for message in self.sides[transport, False][0]:
                amounts[message.peer] += message.nbytes
            for peer, amount in amounts.items():
                self.bare_memory[peer] = torch.ones(amount, dtype=torch.uint8)
        works = []
        for peer, memory in self.bare_memory.items():
            for number, part in enumerate(memory.split(BARE_BYTES)):
                if self.is_trainer:
                    works.append(
                        self.bare_group.send([part], self.trainers + peer, number)
                    )
                else:
                    works.append(self.bare_group.recv([part], peer, number))
        for work in works:
            work.wait()


def make_buffers(
    catalog: Catalog, layout: Layout, rank: int
) -> dict[str, torch.Tensor]:
    """Return the buffers of a rank, with three dimensions.

    Every element is determined by its HF tensor and its position in it, so replicas are equal.
    """
    mine = layout.classes[int(layout.rank_class[rank])]
    shapes = zip(mine.names, mine.shapes.tolist(), mine.dtypes, strict=True)
    made = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, shape, dtype in shapes
    }
    for row, tensor in enumerate(mine.tensor.tolist()):
        if tensor != PADDING:
            shape = catalog.shapes[tensor].tolist()
            # values below 256 are exact in bfloat16
            whole = (torch.arange(math.prod(shape)).view(shape) + 31 * tensor) % 251
            size = mine.size[row].tolist()
            source = _region(mine.start[row].tolist(), size)
            made[mine.names[int(mine.buffer[row])]][
                _region(mine.local[row].tolist(), size)
            ] = whole[source]
    return made


def _region(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    pairs = zip(starts, sizes, strict=True)
    return tuple(slice(start, start + size) for start, size in pairs)
