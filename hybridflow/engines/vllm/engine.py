"""One vLLM server as an engine (`engines.base.Engine`): the server and its HTTP client together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hybridflow.engines.base import ENGINES
from hybridflow.engines.served_engine import ServedEngine
from hybridflow.engines.vllm.client import VllmClient
from hybridflow.engines.vllm.server import VllmServer
from hybridflow.sync.session import Order, Outcome


class VllmEngine(ServedEngine, VllmServer):
    """A `VllmServer` with its `VllmClient`."""

    @cached_property
    def client(self) -> VllmClient:
        """Speaks with the server; may be used after `start`."""
        return VllmClient(self.url, self.admin_key, self.spec.request_timeout_s, name=self.spec.name)

    def receive(self, order: Order, plan: str) -> Outcome:
        """`ServedEngine.receive`; later tokens are of the order's version."""
        outcome = super().receive(order, plan)
        if outcome.status == "served":
            self.client.tokens.version = str(order.version)
        return outcome

    def sleep(self) -> None:
        """On CPU the server agrees and frees nothing."""
        self.client.release_memory()

    def wake(self, tags: Sequence[str]) -> None:
        """Weights are empty until the next sync."""
        self.client.resume_memory(tags)


ENGINES.register("vllm", VllmEngine)
