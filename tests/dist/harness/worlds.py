"""Many process groups, one after another, in one set of processes: starting Megatron once costs
more than most cases."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridflow.process.rendezvous import client_store, master_store
from hybridflow.process.torch_store import TorchStore

TIMEOUT_S = 300.0
C = TypeVar("C", bound=Any)
R = TypeVar("R")


class Worlds:
    """On a rank started by `ranks.run_ranks`: joins worlds of some of the ranks. Every rank goes
    through the same worlds in order."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        connect = master_store if self.rank == 0 else client_store
        self.store = TorchStore(
            connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), TIMEOUT_S)
        )
        self.entered = 0
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def world(self, ranks: Sequence[int]) -> Iterator[None]:
        """torch.distributed over `ranks`, this one among them; Megatron's groups are made inside
        and removed with it."""
        from megatron.core import parallel_state

        store = dist.PrefixStore(f"world{self.entered}", self.store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=list(ranks).index(self.rank),
            world_size=len(ranks),
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        try:
            yield
        finally:
            dist.barrier()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            _free_models()

    def mine(self, ranks: Sequence[int]) -> bool:
        """Whether this rank is in the next world; call it once for every world, on every rank."""
        self.entered += 1
        return self.rank in ranks

    def finish(self) -> None:
        """Wait until all ranks are done: the store lives in rank 0."""
        self.store.add("finished", 1)
        if self.rank == 0:
            deadline = datetime.datetime.now() + datetime.timedelta(seconds=TIMEOUT_S)
            while self.store.add("finished", 0) < self.size and datetime.datetime.now() < deadline:
                time.sleep(0.05)


def _free_models() -> None:
    """Let go of Megatron's models: gradient hooks (distributed_data_parallel.py:335) and optimizers
    make cycles through tensors that Python cannot see. Each world would otherwise leave 50 threads
    of gloo behind.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from hybridflow.process import exchange

    for found in gc.get_objects():
        if isinstance(found, DistributedDataParallel | MegatronOptimizer):
            found.__dict__.clear()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
    exchange._shared = None  # a group of the world that is gone
    gc.collect()


def measured(
    cases: Sequence[C],
    measure: Callable[[C], R],
    *,
    everywhere: bool = False,
    within: Worlds | None = None,
) -> list[R]:
    """Measure every case, in order, on `case.world` ranks of the window that `windows` gives it.
    Returns the results of the cases whose first rank this is; `everywhere`: of all that this rank
    took part in. `within` has further worlds afterwards."""
    worlds = within or Worlds()
    found = []
    for case, ranks in zip(
        cases, windows([case.world for case in cases], worlds.size), strict=True
    ):
        if worlds.mine(ranks):
            with worlds.world(ranks):
                result = measure(case)
            if everywhere or worlds.rank == ranks[0]:
                found.append(result)
    if within is None:
        worlds.finish()
    return found


def windows(sizes: Sequence[int], ranks: int) -> list[range]:
    """For each world in order the ranks that run it: the least loaded neighbours, so that small
    worlds run side by side."""
    load = [0] * ranks
    chosen = []
    for size in sizes:
        starts = range(0, ranks - size + 1, size)
        start = min(starts, key=lambda first: (max(load[first : first + size]), first))
        end = max(load[start : start + size]) + 1
        load[start : start + size] = [end] * size
        chosen.append(range(start, start + size))
    return chosen
