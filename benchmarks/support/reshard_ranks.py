"""What each rank of the benchmark of weight transfer does: ours, the gather-then-broadcast way, and bare sends of the
same bytes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.device.platform import Platform
from hybridflow.models import family_of
from hybridflow.process.rendezvous import client_store, master_store
from hybridflow.process.torch_store import TorchStore
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import PADDING, Catalog, Layout, ParallelShape, megatron_layout
from hybridflow.reshard.planner import make_plan
from hybridflow.sync.messages import Messages
from hybridflow.sync.staging import ReceiveStaging, SendStaging, largest_message
from hybridflow.sync.stream import receive_stream, send_stream
from hybridflow.sync.transports import open_receiver, open_sender, part_bytes
from hybridflow.sync.transports.base import Endpoint
from support.gather import gather_stage, plan_stages

HOST = "127.0.0.1"


class Ranks:
    """Trainer ranks first. Everything that a sync needs more than once is made here, for every side of the
    comparison."""

    def __init__(
        self,
        rank: int,
        hf: dict[str, Any],
        trainer: dict[str, int],
        engine: dict[str, int],
        port: int,
        dtype: str,
        staging: int,
        transports: tuple[str, ...],
        gather_bytes: int,
    ) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        shape = ParallelShape(**trainer)
        self.rank, self.trainers, self.port, self.transports = rank, shape.ranks, port, transports
        family = family_of(hf)
        self.catalog = Catalog.of(family.tensors())
        source = megatron_layout(family, shape.coordinates(), dtype)
        self.plan = make_plan(self.catalog, source, engine_layout(family, [EngineShape(**engine)], dtype), staging)  # type: ignore[arg-type]
        self.engines = self.plan.target.num_ranks
        self.engine = rank - self.trainers
        self.is_trainer = rank < self.trainers
        layout, mine = (self.plan.source, rank) if self.is_trainer else (self.plan.target, self.engine)
        self.live = make_buffers(layout, mine)
        # as the trainer decides it (workers/policy.py)
        self.all_messages = {name: Messages(self.plan, part_bytes(name, Platform("cpu"))) for name in transports}
        self.messages = {
            name: every.outgoing(rank) if self.is_trainer else every.incoming(self.engine)
            for name, every in self.all_messages.items()
        }
        self.stages = plan_stages(family, shape.coordinates(), gather_bytes, getattr(torch, dtype).itemsize)
        self.dtype = getattr(torch, dtype)
        self.store = master_store(HOST, port, 60) if rank == 0 else client_store(HOST, port, 60)
        self.channels: dict[tuple[str, bool], Any] = {}
        self.stagings: dict[tuple[str, bool], Any] = {}
        self.groups: dict[int, Any] = {}
        self.bare_group: Any = None
        self._bare_memory: dict[int, torch.Tensor] = {}

    def open(self, session: str) -> None:
        """Ours: for each transport a session in place and one staged, each with its own memory, as in a run, which has
        one of them."""
        for key in product(self.transports, (False, True)):
            endpoint = self._endpoint(f"{session}, {key}", *key)
            if self.is_trainer:
                self.channels[key] = open_sender(endpoint, self.rank)
                self.stagings[key] = SendStaging(self.rank, endpoint.slots)
            else:
                self.channels[key] = open_receiver(endpoint, self.engine)
                self.stagings[key] = ReceiveStaging(self.engine, endpoint.slots)

    def _endpoint(self, session: str, transport: str, staged: bool) -> Endpoint:
        arriving = [self.all_messages[transport].incoming(rank) for rank in range(self.engines)]
        largest = max(largest_message(messages) for messages in arriving)
        # as the trainer decides it (rollout/weight_sync.py)
        slots = min(8, max(2, self.plan.bucket_bytes * 2 // largest))
        if staged and transport == "shared_memory":
            slots = 1 + max(
                count for messages in arriving for count in Counter(message.peer for message in messages).values()
            )
        senders, receivers = tuple(range(self.trainers)), tuple(range(self.engines))
        return Endpoint(transport, session, HOST, self.port, senders, receivers, largest, 60.0, slots=slots)

    def sync(self, staged: bool, transport: str = "") -> dict[str, Any]:
        """Ours: one sync, over the first transport unless another is named."""
        transport = transport or self.transports[0]
        channel, staging, messages = (
            self.channels[transport, staged],
            self.stagings[transport, staged],
            self.messages[transport],
        )
        if self.is_trainer:
            stats, commit = send_stream(messages, self.live, channel, staging), 0.0
        else:
            received = receive_stream(messages, channel, staging, staged, self.live)
            stats, commit = received.stats, received.commit(self.live)
        return vars(stats) | {"commit": commit}

    def cpu(self) -> float:
        """Seconds of processor time that this rank has used."""
        return time.process_time()

    def check(self) -> int:
        """How many elements of an engine rank's buffers are not what they are to be."""
        if self.is_trainer:
            return 0
        return sum(
            int((self.live[name] != values).sum())
            for name, values in make_buffers(self.plan.target, self.engine).items()
        )

    def forget(self) -> None:
        """Make an engine rank's weights wrong."""
        if not self.is_trainer:
            for values in self.live.values():
                values.zero_()

    def join(self) -> None:
        """The other way: torch's global group, and a group of each stage's leader and the engine's ranks."""
        dist.init_process_group(
            "gloo", store=TorchStore(self.store, "world/"), rank=self.rank, world_size=self.trainers + self.engines
        )
        engines = list(range(self.trainers, self.trainers + self.engines))
        for stage in self.stages:
            self.groups[stage.stage] = dist.new_group([stage.leader, *engines])

    def gather_and_broadcast(self) -> None:
        """The other way: stage after stage, bucket after bucket: whole tensors to the leader, from there to every
        engine rank."""
        for stage in self.stages:
            if self.is_trainer:
                if self.rank in self._ranks_of(stage.stage):
                    self._lead_or_give(stage)
            else:
                self._take(stage)

    def _ranks_of(self, stage: int) -> range:
        share = self.trainers // len(self.stages)
        return range(stage * share, (stage + 1) * share)

    def _lead_or_give(self, stage: Any) -> None:
        for tensors in gather_stage(stage, self.live, self.dtype):
            if tensors:
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
                dist.broadcast(flat, stage.leader, group=self.groups[stage.stage])

    @torch.no_grad()
    def _take(self, stage: Any) -> None:
        wanted = self._wanted()
        for bucket in stage.buckets:
            flat = torch.empty(sum(prod(shape) for _, shape in bucket.tensors), dtype=self.dtype)
            dist.broadcast(flat, stage.leader, group=self.groups[stage.stage])
            begin = 0
            for name, shape in bucket.tensors:
                whole = flat[begin : begin + torch.Size(shape).numel()].view(shape)
                begin += whole.numel()
                whole = whole[(None,) * (3 - whole.dim())]
                for region, place in wanted.get(name, ()):
                    place.copy_(whole[region])

    def _wanted(self) -> dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]]:
        """Per HF tensor: what of it goes where in this rank's buffers."""
        if not hasattr(self, "_wanted_made"):
            layout = self.plan.target.classes[int(self.plan.target.rank_class[self.engine])]
            made: dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]] = {}
            for row, tensor in enumerate(layout.tensor.tolist()):
                if tensor != PADDING:
                    buffer = self.live[layout.names[int(layout.buffer[row])]]
                    region, place = (
                        tuple(slice(int(a), int(a) + int(n)) for a, n in zip(start, layout.size[row], strict=True))
                        for start in (layout.start[row], layout.local[row])
                    )
                    made.setdefault(self.catalog.names[tensor], []).append((region, buffer[place]))
            self._wanted_made = made
        return self._wanted_made

    def open_bare(self) -> None:
        """The limit: a group of its own."""
        world = self.trainers + self.engines
        self.bare_group = dist.ProcessGroupGloo(
            TorchStore(self.store, "bare/"), self.rank, world, timedelta(seconds=60)
        )

    def bare(self, bucket_bytes: int, cached: bool = False) -> int:
        """The limit: the bytes of every pair in messages of `bucket_bytes`, two under way, nothing done with them.

        From and into memory of the weights' size, as weights lie; `cached`: from and into two buffers a peer, which
        stay in the cache.
        """
        amounts: dict[int, int] = {}
        for message in self.messages[self.transports[0]]:
            amounts[message.peer] = amounts.get(message.peer, 0) + message.nbytes
        if not self._bare_memory:
            self._bare_memory = {peer: torch.ones(amount, dtype=torch.uint8) for peer, amount in amounts.items()}
        work: dict[tuple[int, int], Any] = {}
        for peer, number, nbytes in self._rounds(amounts, bucket_bytes):
            if (peer, number - 2) in work:
                work.pop((peer, number - 2)).wait()
            begin = (number % 2 if cached else number) * bucket_bytes
            part = [self._bare_memory[peer][begin : begin + nbytes]]
            if self.is_trainer:
                work[peer, number] = self.bare_group.send(part, self.trainers + peer, number)
            else:
                work[peer, number] = self.bare_group.recv(part, peer, number)
        for last in work.values():
            last.wait()
        return sum(amounts.values())

    @staticmethod
    def _rounds(amounts: dict[int, int], bucket_bytes: int) -> Iterator[tuple[int, int, int]]:
        rounds = max(-(-amount // bucket_bytes) for amount in amounts.values())
        for number in range(rounds):
            for peer, amount in amounts.items():
                if (left := amount - number * bucket_bytes) > 0:
                    yield peer, number, min(left, bucket_bytes)


def make_buffers(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Buffers of a rank, in three dimensions: every element is made from its tensor and its place there, so replicas
    are equal."""
    mine = layout.classes[int(layout.rank_class[rank])]
    shapes = zip(mine.names, mine.shapes.tolist(), mine.dtypes, strict=True)
    made = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in shapes}
    rows = zip(
        *(column.tolist() for column in (mine.tensor, mine.buffer, mine.start, mine.size, mine.local)), strict=True
    )
    for tensor, buffer, start, size, local in rows:
        if tensor == PADDING:
            continue
        whole = made[mine.names[buffer]]
        # the sum of three is below 256: exact in bfloat16
        parts = [
            ((torch.arange(s, s + n) * 31 + tensor * 7) % 80).to(whole.dtype) for s, n in zip(start, size, strict=True)
        ]
        place = tuple(slice(a, a + n) for a, n in zip(local, size, strict=True))
        torch.add(parts[0][:, None, None] + parts[1][:, None], parts[2], out=whole[place])
    return made
