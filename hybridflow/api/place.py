"""Where the code of a run is executed: in the caller's thread, or where that has a running event
loop, as in a notebook, in a thread of the run."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


class Place:
    """The caller's thread."""

    def run(self, work: Callable[[], T]) -> T:
        """The result of the work."""
        return work()

    def check(self) -> None:
        """Raise KeyboardInterrupt where the work had ended before an interrupt reached it."""

    def close(self) -> None:
        """End what was started."""


class OwnThread(Place):
    """A daemon thread that does all work of a run, one piece after another."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()
        self._interrupter: Future[Callable[[Callable[[], bool]], object]] = Future()
        self._is_interrupted = False
        self._thread = threading.Thread(target=self._serve, name="hybridflow-run", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T]) -> T:
        """The result of the work. An interrupt of the caller becomes one of the work."""
        result: Future[T] = Future()
        self._is_interrupted = False
        self._work.put((result, work))
        while not result.done():
            try:
                wait([result])
            except KeyboardInterrupt:
                self._is_interrupted = True
                self._interrupter.result()(lambda: not result.done())
        return result.result()

    def check(self) -> None:
        """Raise KeyboardInterrupt where the work had ended before an interrupt reached it."""
        if self._is_interrupted:
            self._is_interrupted = False
            raise KeyboardInterrupt

    def _serve(self) -> None:
        from hybridflow.single_controller import interrupter

        self._interrupter.set_result(interrupter())
        while (item := self._work.get()) is not None:
            result, work = item
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
            del item, result, work

    def close(self) -> None:
        """End the thread, once it has done its work."""
        self._work.put(None)
        self._thread.join()


def place_for_caller() -> Place:
    """The caller's own thread, unless an event loop runs in it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return Place()
    return OwnThread()
