"""A budget of seconds for a computation of one's own process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OverBudget(BaseException):
    """The budget is used up. No `Exception`, or libraries that try one method after another would
    go on."""


@contextmanager
def time_budget(seconds: float) -> Iterator[None]:
    """Raise `OverBudget` within this context once its wall clock has used up `seconds`. Only the
    main thread of a process can be interrupted; elsewhere, and where an alarm is set already, there
    is no budget."""
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
