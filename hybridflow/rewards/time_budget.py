"""A time limit for a computation in the same process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OverBudget(BaseException):
    """Raised when the time budget is used up. Not a subclass of `Exception`, because libraries that
    try several methods would catch it and continue."""


@contextmanager
def time_budget(seconds: float) -> Iterator[None]:
    """Context manager that raises `OverBudget` after `seconds` of wall-clock time.

    Only the main thread of a process can be interrupted: in other threads, or if an alarm is
    already set, there is no limit.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getitimer(signal.ITIMER_REAL)[0]
    ):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise OverBudget(f"{seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
