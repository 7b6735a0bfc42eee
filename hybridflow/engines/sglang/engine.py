"""One SGLang server as an engine (`engines.base.Engine`): the server and its HTTP client together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.asking import Asking, TokenRequests, Told
from hybridflow.engines.base import Completion
from hybridflow.engines.sglang import weight_transaction
from hybridflow.engines.sglang.client import EngineClient
from hybridflow.engines.sglang.server import EngineServer
from hybridflow.sync.schedule import EngineLayout
from hybridflow.sync.session import Order, Outcome, answer_deadline


class SglangEngine(EngineServer):
    """The calls of an engine go out over HTTP; start, liveness and end are `EngineServer`'s."""

    @cached_property
    def client(self) -> EngineClient:
        """Speaks with the server; may be used after `start`."""
        return EngineClient(self.url, self.admin_key, self.spec.request_timeout_s, name=self.spec.name)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        with_routes: bool = False,
    ) -> list[Completion]:
        """`EngineClient.generate`."""
        return self.client.generate(prompts, sampling, max_new_tokens, stop_token_ids, with_routes=with_routes)

    def ask(self, requests: TokenRequests, told: Told) -> Asking:
        """`EngineClient.ask`."""
        return self.client.ask(requests, told)

    def stop(self) -> None:
        """End the server, and with it the prompts under way."""
        super().stop()
        if "client" in self.__dict__:
            self.client.close()

    def describe(self, host: str, port: int, timeout_s: float) -> EngineLayout:
        """Have all ranks trace where their weights lie, and post it. For an engine that has no requests."""
        client = self.client.with_timeout(answer_deadline(timeout_s))
        return weight_transaction.describe(client, self.spec, host, port, timeout_s)

    def receive(self, order: Order, plan: str) -> Outcome:
        """Carry the order out; `plan` is the digest of the plan that this engine was described for."""
        client = self.client.with_timeout(answer_deadline(order.endpoint.timeout_s))
        return weight_transaction.receive(client, order, plan, self.spec.pipeline)

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
