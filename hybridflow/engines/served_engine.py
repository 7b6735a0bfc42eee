"""A server and its HTTP client together as an engine (`engines.base.Engine`): what all kinds of
server do alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines import weight_transaction
from hybridflow.engines.asking import Asking, TokenRequests, Told
from hybridflow.engines.base import Completion, Extras
from hybridflow.engines.server import ServerProcess
from hybridflow.engines.spec import check_tokens, model_config
from hybridflow.sync.schedule import EngineLayout
from hybridflow.sync.session import Order, Outcome, answer_deadline


class ServedEngine(ServerProcess):
    """The calls of an engine go out over HTTP; start, liveness and end are `ServerProcess`'s."""

    # the kind's `ServerClient`, which is a `weight_transaction.EngineClient` too
    client_class: type[Any]

    @cached_property
    def client(self) -> Any:
        """Speaks with the server, made once. May be used after `start`."""
        return self.client_class(
            self.url, self.admin_key, self.spec.request_timeout_s, name=self.spec.name
        )

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens of the model; 0 where its config does not say."""
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
    ) -> list[Completion]:
        """`ServerClient.generate`."""
        check_tokens(prompts, self.vocabulary, self.spec.name)
        extras = Extras(with_routes, with_support)
        return self.client.generate(prompts, sampling, max_new_tokens, stop_token_ids, extras)

    def ask(self, requests: TokenRequests, told: Told) -> Asking:
        """`ServerClient.ask`."""
        check_tokens(requests.prompts, self.vocabulary, self.spec.name)
        return self.client.ask(requests, told)

    def stop(self) -> None:
        """End the server, and with it the prompts under way."""
        super().stop()
        if "client" in self.__dict__:
            self.client.close()

    def describe(self, host: str, port: int, timeout_s: float) -> EngineLayout:
        """Have all ranks say how they take weights, and post it. For an engine that has no
        requests."""
        client = self.client.with_timeout(answer_deadline(timeout_s))
        return weight_transaction.describe(client, self.spec, host, port, timeout_s)

    def receive(self, order: Order, plan: str) -> Outcome:
        """Carry the order out; `plan` is the digest of the plan that this engine was described
        for."""
        client = self.client.with_timeout(answer_deadline(order.endpoint.timeout_s))
        try:
            return weight_transaction.receive(client, order, plan, self.spec.pipeline)
        finally:
            self.client.tokens.heard()  # prompts under way were kept from answering
