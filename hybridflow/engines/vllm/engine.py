"""One vLLM server as an engine (`engines.base.Engine`): the server and its HTTP client together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hybridflow.engines.served_engine import ServedEngine
from hybridflow.engines.vllm.client import VllmClient
from hybridflow.engines.vllm.server import VllmServer
from hybridflow.errors import EngineError
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
            self.client.tokens.heard()
        return outcome

    def sleep(self) -> None:
        """On CPU the server agrees and frees nothing."""
        self.client.release_memory()

    def wake(self, tags: Sequence[str]) -> None:
        """Weights are empty until the next sync."""
        self.client.resume_memory(tags)

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """A token outside of the vocabulary ends vLLM's process on a CPU, and all other requests with it."""
        for number, prompt in enumerate(prompts):
            if self.vocabulary and len(prompt) and max(prompt) >= self.vocabulary:
                said = f"prompt {number} has token {max(prompt)}, and the model has {self.vocabulary}"
                raise EngineError(said, engine=self.spec.name)
