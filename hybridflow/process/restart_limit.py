"""A limit on how often a failing component is restarted per hour, rather than per run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

HOUR_S = 3600.0


class RestartLimit:
    """Allows at most `most` restarts within any hour; 0 allows none.

    A long run occasionally loses a process; repeated failures have a cause that restarting does not
    fix.

    Args:
        most: maximum number of restarts within `window_s` seconds.
        clock: returns seconds since an arbitrary moment; replaced in tests.
    """

    def __init__(
        self, most: int, window_s: float = HOUR_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most = most
        self.window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque()

    @property
    def left(self) -> int:
        """Return the number of restarts that are still allowed now."""
        oldest = self._clock() - self.window_s
        while self._times and self._times[0] <= oldest:
            self._times.popleft()
        return self.most - len(self._times)

    def take(self) -> bool:
        """Return True if another restart is allowed now, and count it."""
        if self.left < 1:
            return False
        self._times.append(self._clock())
        return True
