"""The event loop in which the driver waits: one for each thread that waits."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import selectors
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_INTERRUPTS = 4
_CANCEL_S = 10.0
_computing_s = 0.0
_log = logging.getLogger(__name__)


class _Selector(selectors.DefaultSelector):
    """Measures the time in which the loop has nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.idle_s = 0.0
        self.pid = os.getpid()

    def select(self, timeout: float | None = None) -> Any:
        start = time.monotonic()
        try:
            return super().select(timeout)
        finally:
            self.idle_s += time.monotonic() - start

    def unregister(self, fileobj: Any) -> Any:
        # a fork shares the kernel's list with its parent, whose loop would no longer be woken
        return super().unregister(fileobj) if self.pid == os.getpid() else None


def _log_what_nobody_saw(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Note the failure of a task that nobody waits for any longer. The first failure has been
    raised where the driver waits, and an interrupt ends every task."""
    error = context.get("exception")
    if not isinstance(error, KeyboardInterrupt):
        _log.info(
            "after the run's end or first failure: %s", context.get("message"), exc_info=error
        )


class _OfThread(threading.local):
    """The loop of this thread, which is kept between calls: tasks go on where they stood."""

    selector: _Selector | None = None
    loop: asyncio.SelectorEventLoop | None = None


_of_thread = _OfThread()


def _has_loop() -> bool:
    """Whether this thread of this process has a loop; a fork has none yet."""
    return _of_thread.selector is not None and _of_thread.selector.pid == os.getpid()


def _loop() -> asyncio.SelectorEventLoop:
    """The loop of this thread, made when it is first needed, and anew in a fork."""
    if _of_thread.loop is None or not _has_loop():
        _of_thread.selector = _Selector()
        _of_thread.loop = asyncio.SelectorEventLoop(_of_thread.selector)
        _of_thread.loop.set_exception_handler(_log_what_nobody_saw)
    return _of_thread.loop


def end_tasks() -> None:
    """End the tasks of this thread's loop, from outside of it: nobody wants their results."""
    if _has_loop():
        cancel_all(list(asyncio.all_tasks(_loop())))


@atexit.register
def _close() -> None:
    """End the tasks that are left: Python reports each of them at the exit."""
    if _has_loop():
        with suppress(BaseException):
            end_tasks()
        _loop().close()


def block_on(awaitable: Awaitable[T]) -> T:
    """Wait for the result from code that is not in an event loop: a script, a test, or the start of
    a run.

    Other tasks of this thread's loop go on meanwhile. An exception that interrupts the wait
    (Ctrl-C) cancels it.

    Raises:
        RuntimeError: this thread's loop is running; there the call is awaited.
    """
    loop = _loop()
    if loop.is_running():
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise RuntimeError(
            "the event loop of this thread is running: await the call instead of waiting for it"
        )
    task = asyncio.ensure_future(_result(awaitable), loop=loop)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        cancel_all([task])
        if task.done() and not task.cancelled():
            task.exception()  # Python reports one that nobody retrieved
        raise


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of this thread's loop, which advances while the thread waits in `block_on`."""
    return _loop().create_task(work)


def interrupter() -> Callable[[Callable[[], bool]], object]:
    """A function by which another thread interrupts this one where it waits in `block_on`, or as
    soon as it does, as Ctrl-C interrupts the main thread. It is given a function that returns
    whether the interrupt is still wanted by then."""
    loop = _loop()

    def interrupt(is_wanted: Callable[[], bool]) -> None:
        if is_wanted():
            raise KeyboardInterrupt

    return lambda is_wanted: loop.call_soon_threadsafe(interrupt, is_wanted)


def cancel_all(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks of this thread's loop, from outside of it, and wait until they have ended, some
    seconds at most."""
    loop = _loop()
    for task in tasks:
        task.cancel()
    # the loop raises an interrupt of one task again in each that waits for it; more of them come
    # from the user
    deadline = time.monotonic() + _CANCEL_S
    for _ in range(_MOST_INTERRUPTS):
        pending = [task for task in tasks if not task.done()]
        left = deadline - time.monotonic()
        if not pending or left <= 0 or loop.is_running():
            return
        stop = loop.call_later(left, loop.stop)
        with suppress(KeyboardInterrupt, RuntimeError):  # RuntimeError: it was stopped
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        stop.cancel()


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


def waited_seconds() -> float:
    """Seconds in which this thread's loop was idle or a worker in this process computed, since the
    thread started.

    This is the time in which workers and engines were working.
    """
    return _computing_s + (_of_thread.selector.idle_s if _of_thread.selector else 0.0)


@contextmanager
def computing() -> Iterator[None]:
    """Count the time inside as that of a worker or an engine in this process. Must not be
    nested."""
    global _computing_s
    start = time.monotonic()
    try:
        yield
    finally:
        _computing_s += time.monotonic() - start


async def in_thread(work: Callable[[], T]) -> T:
    """The result of blocking work, done in a daemon thread: neither the loop nor the exit of the
    process waits for it once nobody wants the result."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return  # it was cancelled
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value = None
        error = None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="blocking-work", daemon=True).start()
    return await result
