"""An engine that runs as a server: the base class of its HTTP client, for generation and control
calls with deadlines, and the engine (`engines.base.Engine`) that combines a server process with its
client.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import requests

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import (
    NO_EXTRAS,
    Asking,
    Completion,
    Extras,
    PromptImages,
    TokenRequests,
    Told,
    check_tokens,
)
from hybridflow.engines.server import ServerProcess, direct_session
from hybridflow.engines.spec import model_config
from hybridflow.engines.token_stream import Asked, TokenStreams
from hybridflow.errors import EngineError, EngineSilent

if TYPE_CHECKING:
    from hybridflow.sync.schedule import EngineLayout
    from hybridflow.sync.session import Order, Outcome


class ServerClient:
    """HTTP client of one engine. Thread-safe.

    Args:
        url: base address, e.g. `ServerProcess.url`.
        admin_key: bearer key of the engine.
        request_timeout_s: timeout of each call in seconds. Prompts in flight fail only if no data
            arrives for this long.
        name: the engine's name in error messages; defaults to the address.
        batch_size: maximum number of prompts per HTTP request; 0 means the class attribute
            `together`.
    """

    streams: type[TokenStreams]  # the token protocol of this kind of server
    together = 1024  # default number of prompts per HTTP request

    def __init__(
        self,
        url: str,
        admin_key: str,
        request_timeout_s: float = 300.0,
        *,
        name: str = "",
        batch_size: int = 0,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name or url
        self.request_timeout_s = request_timeout_s
        self.batch_size = batch_size or self.together
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._local = threading.local()
        self.tokens = self.streams(
            self.url, self._headers, self.name, request_timeout_s, self.batch_size
        )

    def with_timeout(self, request_timeout_s: float) -> Self:
        """Return a client for the same engine with a different deadline."""
        key = self._headers["Authorization"].removeprefix("Bearer ")
        return type(self)(
            self.url, key, request_timeout_s, name=self.name, batch_size=self.batch_size
        )

    def _parameters(self, requests: TokenRequests, limit: int) -> dict[str, Any]:
        """Return the sampling parameters in the server's format, for at most `limit` tokens. Raises
        EngineError if a setting is not supported."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        extras: Extras = NO_EXTRAS,
        images: Sequence[PromptImages] = (),
    ) -> list[Completion]:
        """Generate one response per prompt (`Engine.generate`). To sample a prompt several times,
        repeat it.

        Raises:
            EngineError: the request was rejected, a response is malformed, or no data arrived for
                `request_timeout_s`. `begun` contains the responses so far.
        """
        found: list[Completion | None] = [None] * len(prompts)
        limits = [max_new_tokens] * len(prompts)
        asked = self.ask(
            TokenRequests(prompts, sampling, limits, stop_token_ids, extras, images),
            found.__setitem__,
        )
        try:
            asked.done.result()
        except EngineError as error:
            error.begun = tuple(one or asked.so_far(number) for number, one in enumerate(found))
            raise
        return [completion for completion in found if completion is not None]

    def ask(self, requests: TokenRequests, told: Told) -> Asked:
        """Send the requests and return immediately (see `TokenStreams.ask`).

        Raises:
            EngineError: a prompt is empty, or has images that this kind of server does not read.
        """
        rows = [[int(token) for token in prompt] for prompt in requests.prompts]
        empty = [i for i, row in enumerate(rows) if not row]
        if empty:
            raise EngineError(f"prompt {empty[0]} is empty", engine=self.name)
        if requests.images and not self.tokens.reads_images:
            raise EngineError("this kind of engine does not receive images", engine=self.name)
        parameters = [self._parameters(requests, limit) for limit in requests.max_new_tokens]
        asked = Asked(rows, parameters, requests.extras, told, requests.images)
        self.tokens.ask(asked)
        return asked

    def close(self) -> None:
        """Abort the prompts in flight."""
        self.tokens.close()

    # ---- transport

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._request(path, body)
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(
                f"{path} returned invalid JSON: {answer.text[:200]!r}", engine=self.name
            ) from error

    def _read(self, path: str, timeout_s: float) -> Any:
        """Return the JSON at a path. Raises EngineError."""
        try:
            answer = self._session().get(
                self.url + path, headers=self._headers, timeout=timeout_s, allow_redirects=False
            )
            answer.raise_for_status()
            return answer.json()
        except (requests.RequestException, ValueError) as error:
            raise EngineError(f"{path}: {error}", engine=self.name) from error

    def _request(self, path: str, body: dict[str, Any]) -> requests.Response:
        timeout_s = self.request_timeout_s
        try:
            answer = self._session().post(
                self.url + path,
                json=body,
                headers=self._headers,
                timeout=timeout_s,
                allow_redirects=False,
            )
        except requests.Timeout as error:
            raise EngineSilent(
                f"no response from {path} within {timeout_s:g} s", engine=self.name
            ) from error
        except requests.RequestException as error:
            raise EngineSilent(f"{path}: no connection: {error}", engine=self.name) from error
        if answer.status_code != 200:
            raise EngineError(
                f"{path} returned status {answer.status_code}: {answer.text[:500]}",
                engine=self.name,
            )
        return answer

    def _session(self) -> requests.Session:
        session = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = direct_session()
        return session


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
        # imports torch, which an engine's clients avoid
        from hybridflow.engines import weight_transaction

        client = self.client.with_timeout(weight_transaction.answer_deadline(timeout_s))
        return weight_transaction.describe(client, self.spec, host, port, timeout_s)

    def receive(self, order: Order, plan: str) -> Outcome:
        """Execute the order. `plan` is the digest of the plan built from this engine's
        description."""
        from hybridflow.engines import weight_transaction  # imports torch, like above

        deadline = weight_transaction.answer_deadline(order.endpoint.timeout_s)
        client = self.client.with_timeout(deadline)
        try:
            return weight_transaction.receive(client, order, plan, self.spec.pipeline)
        finally:
            # the sync blocked prompts in flight; that must not count as silence
            self.client.tokens.heard()
