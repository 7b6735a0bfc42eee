"""How often something that was lost may be started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

HOUR_S = 3600.0


class RestartBudget:
    """At most `per_hour` restarts within any hour: losses that are rare never end a run, however long it is; those
    that come again at once have a cause that another start does not remove.

    Args:
        per_hour: 0 allows none.
        clock: seconds that only grow.
    """

    def __init__(self, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_hour, self._clock = per_hour, clock
        self._taken: deque[float] = deque()

    @property
    def left(self) -> int:
        """Restarts that are allowed now."""
        while self._taken and self._clock() - self._taken[0] >= HOUR_S:
            self._taken.popleft()
        return self.per_hour - len(self._taken)

    def take(self) -> bool:
        """Count a restart now and return True, or return False when the last hour has used them all up."""
        if self.left < 1:
            return False
        self._taken.append(self._clock())
        return True
