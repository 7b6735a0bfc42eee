"""Warnings about a flow whose own code runs or waits for a long time without calling the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridflow.observe.progress import duration

_FIRST_S = 60.0  # the interval doubles with each message


class FlowWatch:
    """Measures how long the flow's own code has been running since its last call to the run."""

    def __init__(self) -> None:
        self._calls = 0  # calls in progress
        self._since = time.monotonic()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Attribute the time spent in the block to the run."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._since = time.monotonic()

    def seconds(self) -> float:
        """Return the time in seconds since the last call ended; 0 during a call."""
        return 0.0 if self._calls else time.monotonic() - self._since

    @contextmanager
    def saying(self, say: Callable[[str], None], where: Callable[[], str]) -> Iterator[None]:
        """Report the flow's position, at growing intervals, while it makes no calls. Uses a thread,
        because the flow's code may block the event loop."""
        ended = threading.Event()
        self._since = time.monotonic()

        def watch() -> None:
            limit = _FIRST_S
            while not ended.wait(limit - min(self.seconds(), 0.9 * limit)):
                seconds = self.seconds()
                if seconds < _FIRST_S:
                    limit = _FIRST_S
                elif seconds >= limit:
                    say(f"{where()} for {duration(seconds)} without calling a method of the run")
                    limit = 2 * seconds

        thread = threading.Thread(target=watch, name="flow-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
