"""One SGLang server as an engine (`engines.base.Engine`): the server and its HTTP client together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hybridflow.engines.base import ENGINES
from hybridflow.engines.served_engine import ServedEngine
from hybridflow.engines.sglang.client import EngineClient
from hybridflow.engines.sglang.server import EngineServer


class SglangEngine(ServedEngine, EngineServer):
    """An `EngineServer` with its `EngineClient`."""

    @cached_property
    def client(self) -> EngineClient:
        """Speaks with the server; may be used after `start`."""
        return EngineClient(self.url, self.admin_key, self.spec.request_timeout_s, name=self.spec.name)

    def sleep(self) -> None:
        """On CPU the server agrees and frees nothing."""
        self.client.flush_cache()
        self.client.release_memory(("kv_cache", "weights", *self._graphs))

    def wake(self, tags: Sequence[str]) -> None:
        """Weights are empty until the next sync. Graphs come back with the cache that they read."""
        self.client.resume_memory((*tags, *(self._graphs if "kv_cache" in tags else ())))

    @property
    def _graphs(self) -> tuple[str, ...]:
        return ("cuda_graph",) if self.spec.memory_saver and self.spec.device == "cuda" else ()


ENGINES.register("sglang", SglangEngine)
