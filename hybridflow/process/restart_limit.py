"""How often something that fails may be started again: a number of restarts within an hour, not
within a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

HOUR_S = 3600.0


class RestartLimit:
    """Allows at most `most` restarts within any hour; 0 allows none.

    A long run loses processes now and then; something that fails again and again has a cause that a
    restart does not remove.

    Args:
        most: restarts within `window_s` seconds.
        clock: seconds since any moment; replaced in tests.
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
        """How many more restarts are allowed now."""
        oldest = self._clock() - self.window_s
        while self._times and self._times[0] <= oldest:
            self._times.popleft()
        return self.most - len(self._times)

    def take(self) -> bool:
        """Whether another restart is allowed now; if so, it is counted."""
        if self.left < 1:
            return False
        self._times.append(self._clock())
        return True
