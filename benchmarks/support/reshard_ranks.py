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
from hybridflow.dispatch import Dispatch, WorkerContext, register
from hybridflow.models import family_of
from hybridflow.models.layout import ParallelShape
from hybridflow.process.rendezvous import client_store, master_store
from hybridflow.process.torch_store import TorchStore
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import PADDING, Catalog, megatron_layout
from hybridflow.reshard.planner import make_plan
from hybridflow.sync.messages import Messages
from hybridflow.sync.staging import (
    ReceiveStaging,
    SendStaging,
    largest_message,
    rectangle,
)
from hybridflow.sync.stream import receive_stream, send_stream
from hybridflow.sync.transports import open_receiver, open_sender, part_bytes
from hybridflow.sync.transports.base import Endpoint

DTYPE = "bfloat16"
BARE_BYTES = 16 << 20  # per bare message


class Ranks:
    """A rank with a plan and buffers for all sides of a comparison.

    Args:
        context: the trainer's ranks come first.
        hf: fields of the model's config.json.
        trainer: sizes of the Megatron layout.
        engine: sizes of the only engine.
        staging: bytes per bucket.
        transports: transports that `sync` can use. Each has an in-place and a staged session.
    """

    def __init__(
        self,
        context: WorkerContext,
        hf: Mapping[str, Any],
        trainer: ParallelShape,
        engine: EngineShape,
        staging: int,
        transports: Sequence[str],
    ) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        family = family_of(hf)
        source = megatron_layout(family, trainer.coordinates(), DTYPE)
        target = engine_layout(family, [engine], DTYPE)
        self.plan = make_plan(Catalog.of(family.tensors()), source, target, staging)
        self.at = (context.master_addr, context.master_port)
        self.trainers = trainer.ranks
        self.is_trainer = context.rank < self.trainers
        # on its side
        self.rank = context.rank - (0 if self.is_trainer else self.trainers)
        connect = client_store if context.rank else master_store
        store = connect(*self.at, 60)
        self.live = self._correct_weights()
        self.bare_group = dist.ProcessGroupGloo(
            TorchStore(store, "bare/"),
            context.rank,
            context.world_size,
            timedelta(seconds=60),
        )
        self.bare_memory: dict[int, torch.Tensor] = {}
        self.sides = {
            key: self._open(*key) for key in product(transports, (False, True))
        }

    def _open(self, transport: str, staged: bool) -> tuple[Any, Any, Any]:
        """Return the messages, channel and staging buffers of a session, using the trainer's
        sizes."""
        messages = Messages(self.plan, part_bytes(transport, Platform("cpu")))
        engines = tuple(range(self.plan.target.num_ranks))
        arriving = [messages.incoming(rank) for rank in engines]
        largest = max(map(largest_message, arriving))
        slots = min(8, max(2, self.plan.bucket_bytes * 2 // largest))
        if staged and transport == "shared_memory":
            pairs: Counter[tuple[int, int]] = Counter()
            for rank, one in enumerate(arriving):
                pairs.update((rank, message.peer) for message in one)
            slots = 1 + max(pairs.values())
        endpoint = Endpoint(
            transport,
            f"{transport}, {staged}",
            *self.at,
            tuple(range(self.trainers)),
            engines,
            largest,
            60.0,
            slots=slots,
        )
        if self.is_trainer:
            channel = open_sender(endpoint, self.rank)
            return messages.outgoing(self.rank), channel, SendStaging(self.rank, slots)
        receiving = open_receiver(endpoint, self.rank)
        return arriving[self.rank], receiving, ReceiveStaging(self.rank, slots)

    @register(Dispatch.ONE_TO_ALL)
    def sync(self, transport: str, staged: bool) -> tuple[int, float]:
        """Sync once. Returns the number of bytes that this rank moved and the duration of its
        commit in seconds."""
        messages, channel, staging = self.sides[transport, staged]
        if self.is_trainer:
            return send_stream(messages, self.live, channel, staging).payload_bytes, 0.0
        received = receive_stream(messages, channel, staging, staged, self.live)
        return received.stats.payload_bytes, received.commit(self.live)

    @register(Dispatch.ONE_TO_ALL)
    def cpu(self) -> float:
        """Return the number of CPU seconds that this rank has used."""
        return time.process_time()

    @register(Dispatch.ONE_TO_ALL)
    def forget(self) -> None:
        """Overwrite an engine rank's weights with wrong values."""
        if not self.is_trainer:
            for values in self.live.values():
                values.zero_()

    @register(Dispatch.ONE_TO_ALL)
    def check(self) -> bool:
        """Return True if all elements in this rank's buffers are correct."""
        expected = self._correct_weights()
        return all(torch.equal(self.live[name], expected[name]) for name in expected)

    @register(Dispatch.ONE_TO_ALL)
    def bare(self, transport: str) -> None:
        """Send the bytes of every pair over gloo, using memory of the same size as the weights.
        This is the limit for `transport`."""
        if not self.bare_memory:
            amounts: Counter[int] = Counter()
            for message in self.sides[transport, False][0]:
                amounts[message.peer] += message.nbytes
            for peer, amount in amounts.items():
                self.bare_memory[peer] = torch.ones(amount, dtype=torch.uint8)
        move = self.bare_group.send if self.is_trainer else self.bare_group.recv
        works = []
        for peer, memory in self.bare_memory.items():
            other = peer + self.trainers if self.is_trainer else peer
            for number, part in enumerate(memory.split(BARE_BYTES)):
                works.append(move([part], other, number))
        for work in works:
            work.wait()

    def _correct_weights(self) -> dict[str, torch.Tensor]:
        """Return new buffers for this rank, with three dimensions.

        Every element is determined by its HF tensor and its position in it, so replicas are equal.
        """
        layout = self.plan.source if self.is_trainer else self.plan.target
        mine = layout.classes[int(layout.rank_class[self.rank])]
        made = {}
        for name, shape, dtype in zip(
            mine.names, mine.shapes.tolist(), mine.dtypes, strict=True
        ):
            made[name] = torch.zeros(shape, dtype=getattr(torch, dtype))
        for row, tensor in enumerate(mine.tensor.tolist()):
            if tensor != PADDING:
                shape = self.plan.catalog.shapes[tensor].tolist()
                # values below 256 are exact in bfloat16
                whole = (torch.arange(math.prod(shape)).view(shape) + 31 * tensor) % 251
                size = mine.size[row]
                buffer = made[mine.names[int(mine.buffer[row])]]
                rectangle(buffer, mine.local[row], size).copy_(
                    rectangle(whole, mine.start[row], size)
                )
        return made
