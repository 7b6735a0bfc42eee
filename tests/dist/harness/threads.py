"""A worker group whose ranks are objects of this process: the product's dispatch, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hybridflow.dispatch import Mesh, method_spec, plan_call


class Threads:
    """One thread for each call to a worker."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers, self.world_size = list(workers), len(workers)
        self.pool = ThreadPoolExecutor(8)

    def submit(
        self, method: Callable[..., Any], *args: Any, timeout: float | None = None, only: Sequence[int] | None = None
    ) -> Future[Any]:
        ranks = range(self.world_size) if only is None else only
        mesh = Mesh(tuple(worker.mesh_position() for worker in self.workers)).of(ranks)
        plan = plan_call(method_spec(method), len(ranks), mesh, args, {}).on(ranks)
        running = {rank: self.pool.submit(method, self.workers[rank], *call.args) for rank, call in plan.calls.items()}
        return self.pool.submit(
            lambda: plan.collect({rank: future.result(timeout) for rank, future in running.items()})
        )

    def run(
        self, method: Callable[..., Any], *args: Any, timeout: float | None = None, only: Sequence[int] | None = None
    ) -> Any:
        return self.submit(method, *args, timeout=timeout, only=only).result()
