"""The load of one engine between two readings: from the server's own metrics while it has requests,
and from the requests themselves."""

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
        running, waiting: requests that it computes, and that it has queued.
        kv_use: share of its KV cache that is in use.
    """

    running: int
    waiting: int
    kv_use: float


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine whose server reports its load."""

    def load(self) -> Load:
        """Return the server's load now. Raises EngineError."""

    def take_prefix_hits(self) -> float | None:
        """Return the share of prompt tokens that the server found in its prefix cache, over the
        requests that ended since the last call; None without requests."""


class BusyClock:
    """The time during which an engine has requests, and the tokens that it has generated. Not
    thread-safe."""

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
        """Note whether the engine has requests from now on."""
        if has_requests and self._busy_since is None:
            self._busy_since = self._now()
        elif not has_requests and self._busy_since is not None:
            self._busy += self._now() - self._busy_since
            self._busy_since = None

    def take(self) -> dict[str, float]:
        """Return tokens per second of busy time and the idle share since the last call, and start
        again."""
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
    """Reads an engine's load several times a second while it has requests.

    Args:
        load: returns the load; an error skips the reading.
        is_busy: True while the engine has requests.
    """

    def __init__(self, load: Callable[[], Load | None], is_busy: Callable[[], bool]) -> None:
        self._load = load
        self._is_busy = is_busy
        self._lock = threading.Lock()
        self._seen: list[Load] = []
        threading.Thread(target=self._watch, name="engine load", daemon=True).start()

    def take(self) -> dict[str, float]:
        """Return means and maxima of the readings since the last call; empty without readings."""
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
    """Return the metrics engine/... of a step: means over the engines, and largest maxima."""
    found = {}
    for name in dict.fromkeys(name for load in loads for name in load):
        values = [load[name] for load in loads if name in load]
        found[f"engine/{name}"] = float(max(values) if name.endswith("/max") else np.mean(values))
    return found
