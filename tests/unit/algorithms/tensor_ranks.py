"""Tensor ranks without processes, and the sizes of their output layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

HIDDEN = 8
VOCAB = 51
PADDED = 56


class Ranks:
    """Tensor ranks as threads: the calls of torch.distributed that the module makes, for a group
    that is this object."""

    ReduceOp = dist.ReduceOp

    def __init__(self, world: int) -> None:
        self.world = world
        self.mine = threading.local()
        self.barrier = threading.Barrier(world, timeout=60)
        self.given = [torch.empty(0)] * world

    def get_rank(self, group: Any) -> int:
        return int(self.mine.rank)

    def get_world_size(self, group: Any) -> int:
        return self.world

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.given[self.mine.rank] = tensor.clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def all_reduce(self, tensor: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
        found = torch.stack(self._exchange(tensor))
        tensor.copy_(found.sum(0) if op == dist.ReduceOp.SUM else found.amax(0))

    def all_gather(self, out: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
        for place, part in zip(out, self._exchange(tensor), strict=True):
            place.copy_(part)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        def as_rank(rank: int) -> Any:
            self.mine.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.world) as threads:
            return list(threads.map(as_rank, range(self.world)))
