"""Measurement of an engine's load from two sources: the server's metrics, sampled while it has
requests, and the requests themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

_EVERY_S = 0.2


@dataclass(frozen=True)
class Load:
    """A server's metrics at one moment.

    Attributes:
        running, waiting: number of running requests and of queued requests.
        kv_use: fraction of the KV cache in use.
    """

    running: int
    waiting: int
    kv_use: float


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine whose server reports its load."""

    def load(self) -> Load:
        """Return the server's current load. Raises EngineError if the server does not respond."""

    def take_prefix_hits(self) -> float | None:
        """Return the fraction of prompt tokens found in the server's prefix cache, over all
        requests that have ended since the last call; None if there are none.
        """

    def take_drafts(self) -> dict[str, float]:
        """Return the acceptance rate of drafted tokens, overall and per draft depth, and the mean
        number of tokens per forward pass. Covers the same requests as `take_prefix_hits`; empty if
        the engine does not draft.
        """


class BusyClock:
    """Accumulates the time during which an engine has requests, and the tokens that it generates.
    Not thread-safe.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._from = now()
        self._busy_since: float | None = None
        self._busy = 0.0
        self.tokens = 0

    @property
    def is_busy(self) -> bool:
        """True while the engine has requests."""
        return self._busy_since is not None

    def note(self, has_requests: bool) -> None:
        """Record that the engine is now busy (`has_requests`) or idle."""
        if has_requests and self._busy_since is None:
            self._busy_since = self._now()
        elif not has_requests and self._busy_since is not None:
            self._busy += self._now() - self._busy_since
            self._busy_since = None

    def take(self) -> dict[str, float]:
        """Return the tokens per second of busy time and the idle fraction since the last call, then
        reset the counters.
        """
        now = self._now()
        if self._busy_since is not None:
            self._busy += now - self._busy_since
            self._busy_since = now
        found = {}
        if self._busy > 0:
            found["tokens_per_s"] = self.tokens / self._busy
        if now > self._from:
            found["idle_share"] = 1.0 - self._busy / (now - self._from)
        self._from, self._busy, self.tokens = now, 0.0, 0
        return found


class LoadWatch:
    """Samples an engine's load several times a second while it has requests.

    Args:
        load: function that returns the current load. A sample is skipped if it raises an error.
        is_busy: True while the engine has requests.
    """

    def __init__(self, load: Callable[[], Load | None], is_busy: Callable[[], bool]) -> None:
        self._load = load
        self._is_busy = is_busy
        self._lock = threading.Lock()
        self._seen: list[Load] = []
        threading.Thread(target=self._watch, name="engine load", daemon=True).start()

    def take(self) -> dict[str, float]:
        """Return means and maxima of the samples since the last call; empty if there are none."""
        with self._lock:
            seen, self._seen = self._seen, []
        if not seen:
            return {}
        waiting = [one.waiting for one in seen]
        kv_use = [one.kv_use for one in seen]
        return {
            "running/mean": float(np.mean([one.running for one in seen])),
            "queue/mean": float(np.mean(waiting)),
            "queue/max": float(np.max(waiting)),
            "kv_use/mean": float(np.mean(kv_use)),
            "kv_use/max": float(np.max(kv_use)),
        }

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            if self._is_busy() and (found := self._load()) is not None:
                with self._lock:
                    self._seen.append(found)


def over_engines(loads: list[dict[str, float]]) -> dict[str, float]:
    """Merge the engines' loads into a step's `engine/...` metrics: the average of the means and the
    maximum of the maxima.
    """
    found = {}
    for name in dict.fromkeys(name for load in loads for name in load):
        values = [load[name] for load in loads if name in load]
        found[f"engine/{name}"] = float(max(values) if name.endswith("/max") else np.mean(values))
    return found
