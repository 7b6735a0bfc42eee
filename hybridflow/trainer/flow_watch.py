"""Messages about a flow that is busy with something else than the run for a long time: it waits for
an event, or computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridflow.observe.progress import duration

_FIRST_S = 60.0  # later messages come after twice the time each


class FlowWatch:
    """Measures how long the flow's own code has been going on since its last call of the run."""

    def __init__(self) -> None:
        self._calls = 0  # that the flow waits for
        self._since = time.monotonic()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """The time inside is the run's."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._since = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the end of the last call; 0 in one."""
        return 0.0 if self._calls else time.monotonic() - self._since

    @contextmanager
    def saying(self, say: Callable[[str], None], where: Callable[[], str]) -> Iterator[None]:
        """Say from time to time where the flow is, if it makes no call. A thread does so: the
        flow's own code may block the event loop."""
        ended = threading.Event()
        self._since = time.monotonic()

        def watch() -> None:
            limit = _FIRST_S
            while not ended.wait(limit - min(self.seconds(), 0.9 * limit)):
                seconds = self.seconds()
                if seconds < _FIRST_S:
                    limit = _FIRST_S
                elif seconds >= limit:
                    say(f"{where()} for {duration(seconds)}, without a call of the run")
                    limit = 2 * seconds

        thread = threading.Thread(target=watch, name="flow-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
