"""The driver's event loops. Each waiting thread has a separate loop."""

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
    """A selector that measures how long the loop is idle."""

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
        # A fork shares the kernel's epoll set with its parent. Unregistering here would stop the
        # parent's loop from being woken.
        return super().unregister(fileobj) if self.pid == os.getpid() else None


def _log_orphaned_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log the exception of a task that is no longer awaited, because the driver has already raised
    the first failure or was interrupted.
    """
    error = context.get("exception")
    if not isinstance(error, KeyboardInterrupt):
        _log.info(
            "error after the run's end or first failure: %s", context.get("message"), exc_info=error
        )


class _ThreadLoop(threading.local):
    """This thread's loop. It is kept between calls, so that tasks continue in the next call."""

    selector: _Selector | None = None
    loop: asyncio.SelectorEventLoop | None = None


_thread = _ThreadLoop()


def _has_loop() -> bool:
    """Return True if this thread has a loop. A forked process does not inherit its parent's
    loop."""
    return _thread.selector is not None and _thread.selector.pid == os.getpid()


def _loop() -> asyncio.SelectorEventLoop:
    """Return this thread's loop, which is created on first use and re-created after a fork."""
    if _thread.loop is None or not _has_loop():
        _thread.selector = _Selector()
        _thread.loop = asyncio.SelectorEventLoop(_thread.selector)
        _thread.loop.set_exception_handler(_log_orphaned_error)
    return _thread.loop


def end_tasks() -> None:
    """Cancel all tasks of this thread's loop. Call from outside the loop."""
    if _has_loop():
        cancel_all(list(asyncio.all_tasks(_loop())))


@atexit.register
def _close() -> None:
    """Cancel the remaining tasks, because Python would otherwise report each of them at exit."""
    if _has_loop():
        with suppress(BaseException):
            end_tasks()
        _loop().close()


def block_on(awaitable: Awaitable[T]) -> T:
    """Wait for the result from code outside an event loop: a script, a test, or the start of a run.

    Other tasks of this thread's loop continue meanwhile. An exception that interrupts the wait
    (Ctrl-C) cancels the awaitable.

    Raises:
        RuntimeError: this thread's loop is already running; use `await` instead.
    """
    loop = _loop()
    if loop.is_running():
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise RuntimeError(
            "this thread's event loop is already running; await the call instead of blocking on it"
        )
    task = asyncio.ensure_future(_result(awaitable), loop=loop)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        cancel_all([task])
        if task.done() and not task.cancelled():
            task.exception()  # mark it as retrieved, otherwise Python reports it
        raise


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Create a task in this thread's loop. It advances while the thread waits in `block_on`."""
    return _loop().create_task(work)


def interrupter() -> Callable[[Callable[[], bool]], object]:
    """Return a function that another thread can call to interrupt this one, like Ctrl-C.

    The interrupt takes effect while this thread waits in `block_on`, or at its next wait. The
    function takes a callback, which is called at that time and returns True if the interrupt is
    still wanted.
    """
    loop = _loop()

    def interrupt(is_wanted: Callable[[], bool]) -> None:
        if is_wanted():
            raise KeyboardInterrupt

    return lambda is_wanted: loop.call_soon_threadsafe(interrupt, is_wanted)


def cancel_all(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks of this thread's loop, and wait up to 10 s for them to finish. Call from outside
    the loop."""
    loop = _loop()
    for task in tasks:
        task.cancel()
    # The loop re-raises a task's interrupt in every task that waits for it. The user may send
    # further interrupts.
    deadline = time.monotonic() + _CANCEL_S
    for _ in range(_MOST_INTERRUPTS):
        pending = [task for task in tasks if not task.done()]
        left = deadline - time.monotonic()
        if not pending or left <= 0 or loop.is_running():
            return
        stop = loop.call_later(left, loop.stop)
        with suppress(KeyboardInterrupt, RuntimeError):  # RuntimeError: the loop was stopped
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        stop.cancel()


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


def waited_seconds() -> float:
    """Return the time in seconds, since the thread's start, during which its loop was idle or a
    worker in this process was computing, i.e. the time spent on workers and engines.
    """
    return _computing_s + (_thread.selector.idle_s if _thread.selector else 0.0)


@contextmanager
def computing() -> Iterator[None]:
    """Context manager that attributes the time spent in its block to a worker or engine in this
    process. Must not be nested.
    """
    global _computing_s
    start = time.monotonic()
    try:
        yield
    finally:
        _computing_s += time.monotonic() - start


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a daemon thread and return its result.

    If the call is cancelled, neither the loop nor the process's exit waits for the thread.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return  # cancelled
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
