"""A worker group whose ranks are objects of this process: the product's dispatch, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hybridflow.dispatch import Mesh, method_spec, plan_call


class Reply:
    """A call that runs in a thread, whether or not it is awaited."""

    def __init__(self, running: Future[Any]) -> None:
        self.done = running.done
        self.result = running.result
        self._running = running

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(asyncio.wrap_future(self._running)).__await__()


class Threads:
    """One thread for each call to a worker."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)
        self.world_size = len(workers)
        self.pool = ThreadPoolExecutor(8)

    def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        only: Sequence[int] | None = None,
    ) -> Reply:
        ranks = range(self.world_size) if only is None else only
        mesh = Mesh(tuple(worker.mesh_position() for worker in self.workers)).of(ranks)
        plan = plan_call(method_spec(method), len(ranks), mesh, args, {}).on(ranks)
        running = {
            rank: self.pool.submit(method, self.workers[rank], *call.args)
            for rank, call in plan.calls.items()
        }
        return Reply(
            self.pool.submit(
                lambda: plan.collect(
                    {rank: future.result(timeout) for rank, future in running.items()}
                )
            )
        )
