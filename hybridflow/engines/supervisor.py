"""Supervision of one engine. An engine that has exited or hangs is stopped and restarted in the
background, and its load is sampled while it has requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridflow.engines.base import ENGINES, Engine, Load
from hybridflow.engines.nodes import FirstNode
from hybridflow.engines.spec import EngineSpec, log_of_start
from hybridflow.errors import EngineError, HybridFlowError
from hybridflow.process.restart_limit import RestartLimit

UP = "up"
STARTING = "starting"
FAILED = "failed"
_EVERY_S = 0.2


@dataclass(frozen=True)
class EngineState:
    """The state of an engine. Weights sent before its latest restart are lost."""

    name: str
    state: str  # up | starting | failed
    restarts: int
    reason: str = ""  # reason it is not up, or of its latest restart
    has_weights: bool = False  # True if it can serve prompts; set by its worker


class EngineSupervisor:
    """Starts, monitors and restarts one engine. Not thread-safe.

    Args:
        kind: name in `ENGINES`.
        spec: the engine's spec.
        log_path: log file of the first start; later starts use other files next to it
            (`log_of_start`).
        prepare: called with each restarted engine before its state becomes `up`. If it raises a
            HybridFlowError, the restart fails.
        max_restarts: maximum restarts per hour; beyond that the engine is abandoned.
        nodes: for an engine that spans several nodes, starts and checks the servers on the other
            nodes.
    """

    def __init__(
        self,
        kind: str,
        spec: EngineSpec,
        log_path: Path,
        prepare: Callable[[Engine], None],
        max_restarts: int,
        nodes: FirstNode | None = None,
    ) -> None:
        self._kind = kind
        self.spec = spec
        self.log_path = log_path
        self._prepare = prepare
        self.nodes = nodes
        self.restarts = 0
        self._limit = RestartLimit(max_restarts)
        self._failure = ""
        self._reason = ""
        self._thread: threading.Thread | None = None
        self.engine = self._start()

    def state(self) -> EngineState:
        """Return the engine's current state. If it has exited, begin a restart first."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and not self._failure:
            try:
                self.engine.check_alive()
            except EngineError as error:
                self.restart(str(error).split("\n", 1)[0])
        kind = FAILED if self._failure else STARTING if self._thread is not None else UP
        return EngineState(self.spec.name, kind, self.restarts, self._failure or self._reason)

    def restart(self, reason: str) -> None:
        """Stop what remains of the engine and restart it in the background. `state` reports when it
        is up."""
        if self._thread is not None or self._failure:
            return
        if not self._limit.take():
            most = self._limit.most
            self._failure = (
                f"not restarted: limit rollout.max_restarts={most} per hour reached; last failure: "
                f"{reason}"
            )
            return
        self.restarts = self.restarts + 1
        self._reason = reason
        self._thread = threading.Thread(
            target=self._replace, name=f"restart-{self.spec.name}", daemon=True
        )
        self._thread.start()

    def wait_restarted(self, timeout_s: float) -> EngineState:
        """Wait for a restart in progress, if any."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.state()

    def stop(self) -> None:
        """Stop the engine permanently."""
        self._failure = self._failure or "stopped"
        if self.nodes is not None:
            self.nodes.end()
        self.engine.stop()
        if self._thread is not None:
            self._thread.join(self.spec.start_timeout_s)
            self.engine.stop()

    def _start(self) -> Engine:
        nodes = self.nodes
        number = self.restarts

        def check() -> None:
            if nodes is not None:
                nodes.check(number)

        engine = ENGINES.get(self._kind)(self.spec, log_of_start(self.log_path, number), check)
        engine.start()
        if nodes is not None:
            nodes.begin(number, engine.spec.dist_init_addr)
        return engine

    def _replace(self) -> None:
        try:
            self.engine.stop()
            if self._failure:
                return
            self.engine = self._start()
            self.engine.wait_ready()
            self._prepare(self.engine)
        except (HybridFlowError, OSError) as error:
            self._failure = self._failure or f"restart failed: {error}"


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
        self._from = now
        self._busy = 0.0
        self.tokens = 0
        return found


class LoadWatch:
    """Samples an engine's load several times a second while it has requests.

    Args:
        load: function that returns the current load. A sample is skipped if it raises an error.
        clock: the engine's busy time.
    """

    def __init__(self, load: Callable[[], Load | None], clock: BusyClock) -> None:
        self._load = load
        self._clock = clock
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
            if self._clock.is_busy and (found := self._load()) is not None:
                with self._lock:
                    self._seen.append(found)
