"""Table 2 of the HybridFlow paper (arXiv 2409.19256), executed: three ways from training weights to generation weights.

The model is a stack of matrices. Tensor parallelism cuts rows, pipeline parallelism cuts layers, ZeRO cuts every
matrix's elements over all ranks. Every gather is a real all-gather over gloo through `_gather`, which counts what each
rank receives from others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridflow.process.rendezvous import client_store, master_store
from hybridflow.process.torch_store import TorchStore

LAYERS, ROWS, COLUMNS = 4, 64, 48
HOST = "127.0.0.1"
Place = tuple[slice, slice]  # layers, rows


@dataclass(frozen=True)
class Setting:
    """Sizes of training (pipeline, tensor, data) and of a generation replica (pipeline is 1)."""

    p: int
    t: int
    d: int
    t_g: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.p * self.t * self.d

    def place(self, rank: int) -> Place:
        """What a rank trains; ranks are numbered tensor first, then data, then pipeline, as Megatron does."""
        r, s = rank % self.t, rank // (self.t * self.d)
        return _part(LAYERS, s, self.p), _part(ROWS, r, self.t)

    def replica(self, rank: int) -> list[int]:
        """The ranks that train one copy of the model together with this one."""
        data = rank // self.t % self.d
        return [(s * self.d + data) * self.t + r for s in range(self.p) for r in range(self.t)]

    def shard(self, rank: int) -> int:
        """In HybridFlow: the generation shard that this rank's training shard is a part of."""
        return rank % self.t // (self.t // self.t_g)

    def micro_data_group(self, rank: int) -> list[int]:
        """In HybridFlow: the ranks of a copy whose training shards make up one generation shard."""
        return [other for other in self.replica(rank) if self.shard(other) == self.shard(rank)]


def model() -> torch.Tensor:
    """`[layers, rows, columns]`, a value of its own for every element."""
    return torch.arange(LAYERS * ROWS * COLUMNS, dtype=torch.float32).view(LAYERS, ROWS, COLUMNS)


class Ranks:
    """One of eight ranks."""

    def __init__(self, rank: int, port: int, world: int) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = TorchStore(master_store(HOST, port, 60) if rank == 0 else client_store(HOST, port, 60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        self.rank, self.received, self.peak = rank, 0, 0

    def transition(self, design: str, p: int, t: int, d: int, t_g: int) -> dict[str, int]:
        """Bytes that this rank receives, that it holds when the gather ends, and of training weights that serve
        generation nothing."""
        setting = Setting(p, t, d, t_g)
        self.received = self.peak = 0
        trained, generation, place = getattr(self, f"_{design}")(setting)
        if not torch.equal(generation, model()[place]):
            raise ValueError(f"{design}: rank {self.rank} has other generation weights than the model's")
        serves = torch.zeros_like(model(), dtype=torch.bool)
        serves[place] = True
        redundant = int((trained & ~serves).sum()) * model().element_size()
        return {"received": self.received, "peak": self.peak, "redundancy": redundant}

    def _ds_chat(self, s: Setting) -> tuple[torch.Tensor, torch.Tensor, Place]:
        """ZeRO-3 training: all parameters are gathered over all ranks, then cut for generation."""
        place = (slice(0, LAYERS), _part(ROWS, self.rank % s.t_g, s.t_g))
        mine = _part(ROWS * COLUMNS, self.rank, s.world)
        full = self._gather(model().view(LAYERS, -1)[:, mine], lambda _: list(range(s.world)))
        whole = torch.cat(list(full), dim=1).view(LAYERS, ROWS, COLUMNS)
        trained = torch.zeros(LAYERS, ROWS * COLUMNS, dtype=torch.bool)
        trained[:, mine] = True
        return trained.view_as(whole), whole[place].clone(), place

    def _hybridflow_v(self, s: Setting) -> tuple[torch.Tensor, torch.Tensor, Place]:
        """3D-parallel training, generation groups of neighbouring ranks: everything is gathered within the
        model-parallel group."""
        place = (slice(0, LAYERS), _part(ROWS, self.rank % s.t_g, s.t_g))
        full = self._gather(model()[s.place(self.rank)], s.replica)
        whole = torch.empty_like(model())
        for rank, part in zip(s.replica(self.rank), full, strict=True):
            whole[s.place(rank)] = part
        return self._trained(s), whole[place].clone(), place

    def _hybridflow(self, s: Setting) -> tuple[torch.Tensor, torch.Tensor, Place]:
        """The paper's grouping: a generation shard is the union of training shards, gathered within the micro
        data-parallel group."""
        place = (slice(0, LAYERS), _part(ROWS, s.shard(self.rank), s.t_g))
        parts = self._gather(model()[s.place(self.rank)], s.micro_data_group)
        shard = torch.empty_like(model()[place])
        for rank, part in zip(s.micro_data_group(self.rank), parts, strict=True):
            layers, rows = s.place(rank)
            shard[layers, rows.start - place[1].start : rows.stop - place[1].start] = part
        return self._trained(s), shard, place

    def _trained(self, s: Setting) -> torch.Tensor:
        trained = torch.zeros_like(model(), dtype=torch.bool)
        trained[s.place(self.rank)] = True
        return trained

    def _gather(self, mine: torch.Tensor, members: Callable[[int], list[int]]) -> torch.Tensor:
        """All-gather in place among the `members` of this rank's group: `[group, *mine.shape]`. Counts bytes."""
        ranks, group = members(self.rank), None
        # every rank makes every group, in one order
        for each in sorted({tuple(members(rank)) for rank in range(dist.get_world_size())}):
            made = dist.new_group(list(each))
            group = made if self.rank in each else group
        parts = torch.empty(len(ranks), *mine.shape)
        parts[ranks.index(self.rank)] = mine
        outputs = list(parts.unbind(0))
        dist.all_gather(outputs, parts[ranks.index(self.rank)], group=group)
        self.received += sum(part.nbytes for rank, part in zip(ranks, outputs, strict=True) if rank != self.rank)
        self.peak = max(self.peak, parts.untyped_storage().nbytes())
        return parts


def _part(whole: int, index: int, count: int) -> slice:
    return slice(index * whole // count, (index + 1) * whole // count)
