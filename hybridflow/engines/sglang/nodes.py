"""One engine over several nodes: the worker beside its first node says when a life begins and where its servers meet;
the others follow.

Each node has a server of its own (`EngineSpec.node_rank`). The first node's worker keeps a store, as long as it lives:

    life/N          where the servers of the engine's N-th start meet ("host:port")
    lost/N/NODE     why the server of another node is gone
    end             nobody need follow any longer

The first node alone decides about starts, so an engine is always started again as a whole.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.engines.sglang.server import EngineServer, EngineSpec, log_of_life
from hybridflow.errors import EngineError
from hybridflow.process.rendezvous import client_store, master_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_POLL_S = 0.2
_log = logging.getLogger(__name__)


class FirstNode:
    """The store that the other nodes of an engine follow.

    Args:
        spec: of the first node's server. host: an address of this machine that the other nodes reach; loopback when
            there is one machine.
    """

    def __init__(self, spec: EngineSpec, host: str) -> None:
        self.spec = spec
        self._store = master_store(host, 0, spec.start_timeout_s)
        self.address: tuple[str, int] = (host, self._store.port)

    def begin(self, life: int, meet_at: str) -> None:
        """A new life of the engine: the other nodes end what they run and start servers that meet at `meet_at`."""
        self._store.set(f"life/{life}", meet_at)

    def check(self, life: int) -> None:
        """Raise EngineError, which names the node and the reason, when a server of another node is gone."""
        for node in range(1, self.spec.nnodes):
            key = f"lost/{life}/{node}"
            if self._store.check([key]):
                raise EngineError(
                    f"its server on node {node} is gone: {self._store.get(key).decode()}", engine=self.spec.name
                )

    def end(self) -> None:
        """The engine ends for good."""
        self._store.set("end", "1")


class OtherNode:
    """The server of another node of an engine; starts, is replaced and ends as the first node says. Its work is done by
    a thread.

    Args:
        spec: with this node's `node_rank`.
        log_path: of the first life; later ones write `NAME.1.log`, `NAME.2.log` beside it.
        host, port: `FirstNode.address`.

    Raises:
        EngineError: nobody answers there within the spec's `start_timeout_s`.
    """

    def __init__(self, spec: EngineSpec, log_path: Path, host: str, port: int) -> None:
        self.spec, self.log_path = spec, log_path
        try:
            self._store: TCPStore = client_store(host, port, spec.start_timeout_s)
        except RuntimeError as error:  # torch's DistError and its children
            raise EngineError(
                f"node {spec.node_rank} cannot reach the first one at {host}:{port}: {error}", engine=spec.name
            ) from error
        self._server: EngineServer | None = None
        self._life, self._told = -1, -1
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"follow-{spec.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Session of the server's processes (`EngineServer.pid`); 0 before the first start."""
        return self._server.pid if self._server else 0

    def stop(self) -> None:
        """End the server and follow no longer."""
        self._stopping.set()
        self._thread.join(self.spec.start_timeout_s)

    def _follow(self) -> None:
        try:
            while not self._stopping.wait(_POLL_S) and not self._store.check(["end"]):
                newest = self._life
                while self._store.check([f"life/{newest + 1}"]):
                    newest += 1
                try:
                    if newest > self._life:
                        self._life = newest
                        self._start(self._store.get(f"life/{newest}").decode())
                    elif self._server is not None:
                        self._server.check_alive()
                except (EngineError, OSError) as error:
                    self._tell(str(error).split("\n", 1)[0])
        except RuntimeError as error:  # torch's DistError: the first node's worker is gone, and with it the engine
            _log.warning("%s, node %d: the first node is gone: %s", self.spec.name, self.spec.node_rank, error)
        finally:
            if self._server is not None:
                self._server.stop()

    def _start(self, meet_at: str) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = EngineServer(replace(self.spec, dist_init_addr=meet_at), log_of_life(self.log_path, self._life))
        self._server.start()

    def _tell(self, reason: str) -> None:
        if self._told < self._life:  # once a life
            self._told = self._life
            self._store.set(f"lost/{self._life}/{self.spec.node_rank}", reason)
