"""Selection of the thread that executes a run's code: the caller's thread, or a separate one if an
event loop is already running in the caller's, as in a notebook."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


class Place:
    """Executes the work of a run in the caller's thread."""

    def run(self, work: Callable[[], T]) -> T:
        """Run the work and return its result."""
        return work()

    def check(self) -> None:
        """Raise KeyboardInterrupt if an interrupt arrived only after the work had finished."""

    def close(self) -> None:
        """Release the thread, if any."""


class OwnThread(Place):
    """Executes all work of a run sequentially in one daemon thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()
        self._interrupter: Future[Callable[[Callable[[], bool]], object]] = Future()
        self._is_interrupted = False
        self._thread = threading.Thread(target=self._serve, name="hybridflow-run", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T]) -> T:
        """Run the work and return its result. If the caller is interrupted, so is the work."""
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
        """Raise KeyboardInterrupt if an interrupt arrived only after the work had finished."""
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
        """Stop the thread after it has finished its work."""
        self._work.put(None)
        self._thread.join()


def place_for_caller() -> Place:
    """Return the caller's thread, or a new thread if an event loop is running in the caller's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return Place()
    return OwnThread()
