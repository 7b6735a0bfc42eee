"""One engine over its restarts: when its processes are gone or do not answer, it is ended and started again in the
background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridflow.engines.sglang.client import EngineClient
from hybridflow.engines.sglang.nodes import FirstNode
from hybridflow.engines.sglang.server import EngineServer, EngineSpec, log_of_life
from hybridflow.errors import EngineError, HybridFlowError
from hybridflow.process.restart_limit import RestartLimit

UP, STARTING, FAILED = "up", "starting", "failed"


@dataclass(frozen=True)
class EngineState:
    """How an engine stands. `life` counts its starts from 0: weights sent in an earlier life are gone. `reason`: why it
    is not up."""

    name: str
    state: str
    life: int
    reason: str = ""


class EngineKeeper:
    """Starts an engine, watches it and replaces it. Its methods are called from one thread.

    Args:
        spec: what to serve.
        log_path: of the first life; later ones write `NAME.1.log`, `NAME.2.log` beside it.
        prepare: called with the client of every later life before it counts as up; raises one of our errors to fail it.
        max_restarts: how many times within an hour; then the engine is given up.
        nodes: of an engine over several nodes: tells the others to start when this one does, and whether they run.
    """

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        prepare: Callable[[EngineClient], None],
        max_restarts: int,
        nodes: FirstNode | None = None,
    ) -> None:
        self.spec, self.log_path, self._prepare, self.nodes = spec, log_path, prepare, nodes
        self.life, self._restarts = 0, RestartLimit(max_restarts)
        self._failure, self._reason = "", ""
        self._thread: threading.Thread | None = None
        self.server, self.client = self._start()

    def wait_ready(self) -> None:
        """Wait for the first life. EngineError when it does not come up: nothing can run then."""
        self.server.wait_ready()

    def state(self) -> EngineState:
        """How the engine stands now; a dead one is started again."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and not self._failure:
            try:
                self.server.check_alive()
            except EngineError as error:
                self.restart(_first_line(error))
        kind = FAILED if self._failure else STARTING if self._thread is not None else UP
        return EngineState(self.spec.name, kind, self.life, self._failure or self._reason)

    def restart(self, reason: str) -> None:
        """End what is left of the engine and start it again in the background; `state` tells when it is up."""
        if self._thread is not None or self._failure:
            return
        if not self._restarts.take():
            self._failure = (
                f"given up: rollout.max_restarts={self._restarts.most} allows no more restarts in this hour: {reason}"
            )
            return
        self.life, self._reason = self.life + 1, reason
        self._thread = threading.Thread(target=self._replace, name=f"restart-{self.spec.name}", daemon=True)
        self._thread.start()

    def wait_restarted(self, timeout_s: float) -> EngineState:
        """Wait for a restart under way, if there is one."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.state()

    def stop(self) -> None:
        """End the engine for good."""
        self._failure = self._failure or "stopped"
        if self.nodes is not None:
            self.nodes.end()
        self.server.stop()
        if self._thread is not None:
            self._thread.join(self.spec.start_timeout_s)
            self.server.stop()

    def _start(self) -> tuple[EngineServer, EngineClient]:
        nodes, life = self.nodes, self.life
        server = EngineServer(
            self.spec, log_of_life(self.log_path, life), None if nodes is None else lambda: nodes.check(life)
        )
        server.start()
        if nodes is not None:
            nodes.begin(life, server.spec.dist_init_addr)
        return server, EngineClient(server.url, server.admin_key, self.spec.request_timeout_s, name=self.spec.name)

    def _replace(self) -> None:
        try:
            self.server.stop()
            if self._failure:
                return
            self.server, self.client = self._start()
            self.server.wait_ready()
            self._prepare(self.client)
        except HybridFlowError as error:
            self._failure = self._failure or f"could not be started again: {error}"
        except OSError as error:
            self._failure = self._failure or f"could not be started again: {error}"


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
