"""Coordination of an engine that spans several nodes. The worker on the first node decides when the
servers start and where the ranks rendezvous; the other nodes follow.

Each node has a separate server (`EngineSpec.node_rank`). While it runs, the first node's worker
serves a store:

    start/N         rendezvous of the engine's N-th start ("host:port")
    lost/N/NODE     the reason why another node's server exited
    end             the other nodes stop following

Only the first node decides when to start, so all servers of an engine are restarted together.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

from hybridflow.engines.base import ENGINES, Engine
from hybridflow.engines.spec import EngineSpec, log_of_start
from hybridflow.errors import EngineError
from hybridflow.process.rendezvous import client_store, master_store

_POLL_S = 0.2
_log = logging.getLogger(__name__)


class FirstNode:
    """The store through which an engine's first node directs the other nodes.

    Args:
        spec: spec of the first node's server.
        host: an address of this machine that other nodes can reach; loopback for a single machine.
    """

    def __init__(self, spec: EngineSpec, host: str) -> None:
        self.spec = spec
        self._store = master_store(host, 0, spec.start_timeout_s)
        self.address: tuple[str, int] = (host, self._store.port)

    def begin(self, start: int, meet_at: str) -> None:
        """Tell the other nodes to stop their servers and start new ones, which rendezvous at
        `meet_at`.
        """
        self._store.set(f"start/{start}", meet_at)

    def check(self, start: int) -> None:
        """Raise EngineError, naming the node and the reason, if another node's server has
        exited."""
        for node in range(1, self.spec.nnodes):
            key = f"lost/{start}/{node}"
            if self._store.check([key]):
                raise EngineError(
                    f"the server on node {node} exited: {self._store.get(key).decode()}",
                    engine=self.spec.name,
                )

    def end(self) -> None:
        """Tell the other nodes to stop their servers and not to restart them."""
        self._store.set("end", "1")


class OtherNode:
    """An engine's server on a node other than the first. A thread starts, replaces and stops it as
    directed by the first node.

    Args:
        kind: name in `ENGINES`.
        spec: the engine's spec with this node's `node_rank`.
        log_path: log file of the first start; later starts use other files next to it
            (`log_of_start`).
        host, port: `FirstNode.address`.

    Raises:
        EngineError: the first node did not respond within the spec's `start_timeout_s`.
    """

    def __init__(self, kind: str, spec: EngineSpec, log_path: Path, host: str, port: int) -> None:
        self._kind = kind
        self.spec = spec
        self.log_path = log_path
        try:
            self._store = client_store(host, port, spec.start_timeout_s)
        except RuntimeError as error:
            raise EngineError(
                f"node {spec.node_rank} could not reach the first node at {host}:{port}: {error}",
                engine=spec.name,
            ) from error
        self.server: Engine | None = None
        self._number = -1
        self._reported = -1
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._follow, name=f"follow-{spec.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the server and the thread."""
        self._stopping.set()
        self._thread.join(self.spec.start_timeout_s)

    def _follow(self) -> None:
        try:
            while not self._stopping.wait(_POLL_S) and not self._store.check(["end"]):
                newest = self._number
                while self._store.check([f"start/{newest + 1}"]):
                    newest += 1
                try:
                    if newest > self._number:
                        self._number = newest
                        self._start(self._store.get(f"start/{newest}").decode())
                    elif self.server is not None:
                        self.server.check_alive()
                except (EngineError, OSError) as error:
                    self._report(str(error).split("\n", 1)[0])
        except RuntimeError as error:  # the first node's worker exited, and the engine with it
            _log.warning(
                "%s, node %d: no response from the first node: %s",
                self.spec.name,
                self.spec.node_rank,
                error,
            )
        finally:
            if self.server is not None:
                self.server.stop()

    def _start(self, meet_at: str) -> None:
        if self.server is not None:
            self.server.stop()
        spec = replace(self.spec, dist_init_addr=meet_at)
        self.server = ENGINES.get(self._kind)(
            spec, log_of_start(self.log_path, self._number), lambda: None
        )
        self.server.start()

    def _report(self, reason: str) -> None:
        if self._reported < self._number:  # once per start
            self._reported = self._number
            self._store.set(f"lost/{self._number}/{self.spec.node_rank}", reason)
