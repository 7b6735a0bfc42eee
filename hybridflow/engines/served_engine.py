"""A server process and its HTTP client, combined into an engine (`engines.base.Engine`): the base
class of all engines that run as servers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines import weight_transaction
from hybridflow.engines.asking import Asking, TokenRequests, Told
from hybridflow.engines.base import Completion, Extras, PromptImages
from hybridflow.engines.server import ServerProcess
from hybridflow.engines.spec import check_tokens, model_config
from hybridflow.sync.schedule import EngineLayout
from hybridflow.sync.session import Order, Outcome, answer_deadline


class ServedEngine(ServerProcess):
    """An engine that is called over HTTP. Startup, liveness checks and shutdown are inherited from
    `ServerProcess`.
    """

    # the server's `ServerClient`, which also implements `weight_transaction.EngineClient`
    client_class: type[Any]

    @cached_property
    def client(self) -> Any:
        """The server's client. Valid after `start`."""
        return self.client_class(
            self.url, self.admin_key, self.spec.request_timeout_s, name=self.spec.name
        )

    @cached_property
    def vocabulary(self) -> int:
        """The model's vocabulary size; 0 if its config does not specify it."""
        return int(model_config(self.spec).get("vocab_size") or 0)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        with_routes: bool = False,
        with_support: bool = False,
        images: Sequence[PromptImages] = (),
    ) -> list[Completion]:
        """Generate through `ServerClient.generate`."""
        check_tokens(prompts, self.vocabulary, self.spec.name)
        extras = Extras(with_routes, with_support)
        return self.client.generate(
            prompts, sampling, max_new_tokens, stop_token_ids, extras, images
        )

    def ask(self, requests: TokenRequests, told: Told) -> Asking:
        """Send requests through `ServerClient.ask`."""
        check_tokens(requests.prompts, self.vocabulary, self.spec.name)
        return self.client.ask(requests, told)

    def stop(self) -> None:
        """Stop the server and abort the prompts in flight."""
        super().stop()
        if "client" in self.__dict__:
            self.client.close()

    def describe(self, host: str, port: int, timeout_s: float) -> EngineLayout:
        """Have all ranks post their layouts. The engine must not have any requests in flight."""
        client = self.client.with_timeout(answer_deadline(timeout_s))
        return weight_transaction.describe(client, self.spec, host, port, timeout_s)

    def receive(self, order: Order, plan: str) -> Outcome:
        """Execute the order. `plan` is the digest of the plan built from this engine's
        description."""
        client = self.client.with_timeout(answer_deadline(order.endpoint.timeout_s))
        try:
            return weight_transaction.receive(client, order, plan, self.spec.pipeline)
        finally:
            # the sync blocked prompts in flight; that must not count as silence
            self.client.tokens.heard()
