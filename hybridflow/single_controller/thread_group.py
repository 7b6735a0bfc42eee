"""A group of workers in the driver's process, without Ray. Each worker is called in a separate
thread. Intended for workers that only control other processes, such as the engines' workers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from hybridflow.dispatch import WorkerContext, method_spec, plan_call
from hybridflow.errors import WorkerError
from hybridflow.placement.place import PORTS
from hybridflow.single_controller.cluster import LOOPBACK

_Work = tuple[ThreadFuture[Any], Callable[[], Any]]


class Pending(Protocol):
    """A call in progress."""

    def done(self) -> bool:
        """Return True if awaiting the call would return immediately."""

    def __await__(self) -> Generator[Any, None, Any]: ...


class ThreadGroup:
    """Calls methods of several workers, each a `worker_class(context, *args)`, through the same
    dispatch as a `WorkerGroup`.

    Calls on one worker are executed in the order in which they were made. A method's exceptions
    propagate unchanged.
    """

    def __init__(
        self, worker_class: type, *, role: str, args: Sequence[Any] = (), log_dir: str | Path
    ) -> None:
        """Create a group without workers. `add` constructs them."""
        self.worker_class = worker_class
        self.workers: list[Any] = []
        self._role = role
        self._args = args
        self._log_dir = Path(log_dir).resolve()
        self._threads: list[_WorkerThread] = []

    def add(self, count: int) -> None:
        """Construct this many workers, one after another, in this thread. If a constructor fails,
        `workers` contains those constructed so far.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(count):
            log_path = self._log_dir / f"{self._role}-rank{rank}.log"
            context = WorkerContext(rank, count, rank, LOOPBACK, 0, LOOPBACK, log_path, PORTS)
            self.workers.append(self.worker_class(context, *self._args))
            self._threads.append(_WorkerThread(f"{self._role}-{rank}"))

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return len(self.workers)

    def is_alive(self) -> bool:
        """Return True, because the workers live as long as the driver."""
        return True

    async def restart(self) -> None:
        """Raise WorkerError, because these workers can only be lost together with the driver."""
        raise WorkerError("workers in the driver's process cannot be restarted")

    def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        only: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Pending:
        """Call a method of the worker class, as `WorkerGroup.call` does. Awaiting the return value
        yields the result.

        Raises:
            WorkerError: (when awaited) a worker did not return within `timeout` seconds.
        """
        spec = method_spec(method)
        ranks = list(range(self.world_size)) if only is None else list(only)
        plan = plan_call(spec, len(ranks), None, args, kwargs).on(ranks)
        begun = {}
        for rank, call in plan.calls.items():
            bound = getattr(self.workers[rank], spec.name)
            begun[rank] = self._threads[rank].begin(partial(bound, *call.args, **call.kwargs))
        return _Calls(spec.name, begun, plan.collect, timeout)

    def close(self) -> None:
        """End the threads once they have executed all pending calls."""
        for thread in self._threads:
            thread.end()


class _WorkerThread:
    """A daemon thread that executes the calls of one worker."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def begin(self, work: Callable[[], Any]) -> ThreadFuture[Any]:
        """Queue a call."""
        result: ThreadFuture[Any] = ThreadFuture()
        self._work.put((result, work))
        return result

    def end(self) -> None:
        """End the thread once it has executed the calls in its queue."""
        self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            result, work = item
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
            del item, result, work


class _Calls:
    """One call that runs on several workers."""

    def __init__(
        self,
        name: str,
        begun: Mapping[int, ThreadFuture[Any]],
        collect: Callable[[Mapping[int, Any]], Any],
        timeout: float | None,
    ) -> None:
        self._name = name
        self._begun = begun
        self._collect = collect
        self._timeout = timeout

    def done(self) -> bool:
        """Return True if all workers have returned."""
        return all(one.done() for one in self._begun.values())

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        wrapped = list(map(asyncio.wrap_future, self._begun.values()))
        _, late = await asyncio.wait(wrapped, timeout=self._timeout)
        if late:
            raise WorkerError(f"{self._name} did not return within {self._timeout:g} s")
        return self._collect({rank: one.result() for rank, one in self._begun.items()})
