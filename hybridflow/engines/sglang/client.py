"""HTTP client of one SGLang server: generation and the weight-update session. Every call has a deadline.

Log-probabilities: SGLang returns, for each generated token, log softmax(logits / temperature) over the whole
vocabulary, taken *before* top-k, top-p and min-p cut the distribution (sglang/srt/layers/sampler.py, standard path). At
temperature 0 it is log softmax(logits). A trainer that recomputes them divides its logits by the same temperature and
ignores top-k and top-p.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import requests

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.asking import TokenRequests, Told
from hybridflow.engines.base import Completion
from hybridflow.engines.sglang.token_stream import Asked, TokenStreams
from hybridflow.engines.sglang.weight_control import LOADER, Control, payload
from hybridflow.errors import EngineError, EngineSilent

PauseMode = Literal["abort", "retract", "in_place"]
_SETTLE_S = 30  # for the scheduler to let go of a batch that has been answered


class EngineClient:
    """Speaks to one engine. Safe to use from several threads.

    Args:
        url: base address, e.g. `EngineServer.url`.
        admin_key: bearer key of the engine.
        request_timeout_s: deadline of each call, in seconds; of prompts under way, how long nothing at all may come.
        name: the engine's name in error messages; defaults to the address.
        batch_size: prompts in one HTTP request; a longer list goes out as several.
    """

    def __init__(
        self, url: str, admin_key: str, request_timeout_s: float = 300.0, *, name: str = "", batch_size: int = 1024
    ) -> None:
        self.url, self.name = url.rstrip("/"), name or url
        self.request_timeout_s, self.batch_size = request_timeout_s, batch_size
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._local = threading.local()
        self.tokens = TokenStreams(self.url, self._headers, self.name, request_timeout_s, batch_size)

    def with_timeout(self, request_timeout_s: float) -> EngineClient:
        """The same engine with another deadline."""
        key = self._headers["Authorization"].removeprefix("Bearer ")
        return EngineClient(self.url, key, request_timeout_s, name=self.name, batch_size=self.batch_size)

    # ---- generation

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        with_routes: bool = False,
    ) -> list[Completion]:
        """One response for each prompt, in order. Repeat a prompt to sample it several times.

        Args:
            prompts: token ids.
            sampling: the same for all.
            max_new_tokens: upper bound on the response's length.
            stop_token_ids: generation ends with, and includes, the first of these.
            with_routes: bring the experts of each token; the engine was started with
                `EngineSpec.return_routed_experts`.

        Raises:
            EngineError: refused, malformed, or nothing came for `request_timeout_s`; with what has come (`begun`).
        """
        found: list[Completion | None] = [None] * len(prompts)
        limits = [max_new_tokens] * len(prompts)
        asked = self.ask(TokenRequests(prompts, sampling, limits, stop_token_ids, with_routes), found.__setitem__)
        try:
            asked.done.result()
        except EngineError as error:
            error.begun = tuple(one or asked.so_far(number) for number, one in enumerate(found))
            raise
        return [completion for completion in found if completion is not None]

    def ask(self, requests: TokenRequests, told: Told) -> Asked:
        """Send the requests and return; see `TokenStreams.ask`.

        Raises:
            EngineError: a prompt has no tokens.
        """
        rows = [[int(token) for token in prompt] for prompt in requests.prompts]
        empty = [i for i, row in enumerate(rows) if not row]
        if empty:
            raise EngineError(f"prompt {empty[0]} has no tokens", engine=self.name)
        shared = {
            "temperature": requests.sampling.temperature,
            "top_p": requests.sampling.top_p,
            "top_k": requests.sampling.top_k,
            "stop_token_ids": [int(token) for token in requests.stop_token_ids],
        }
        parameters = [shared | {"max_new_tokens": int(limit)} for limit in requests.max_new_tokens]
        asked = Asked(rows, parameters, requests.with_routes, told)
        self.tokens.ask(asked)
        return asked

    # ---- memory

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give the device memory of these parts back; their contents are lost. No request may be running.

        On CPU SGLang answers well and frees nothing: its memory saver needs CUDA's virtual memory calls.
        """
        self._request("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take the memory of these parts again; weights must then be sent before the next request."""
        self._request("/resume_memory_occupation", {"tags": list(tags)})

    # ---- weights

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating.

        Args:
            mode: what happens to running requests. abort: they end; retract: they wait, and their KV cache is computed
                anew; in_place: they wait and keep it, although it was made by the old weights.
        """
        self._post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Continue generating after `pause`."""
        self._post("/continue_generation", {})
        self.tokens.heard()

    def close(self) -> None:
        """Give up the prompts under way."""
        self.tokens.close()

    def begin_weight_update(self) -> None:
        """Open the session that `call_ranks` needs. Pause first: otherwise it waits for the requests in flight."""
        self._post("/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close the session. A session left open refuses the next `begin_weight_update`."""
        self._post("/end_weight_update", {})

    def call_ranks(self, control: Control, *, flush_cache: bool = True) -> None:
        """Bring a message to our code in every tensor-parallel rank and wait until all have handled it. They report
        through the sync's store.

        Needs an open session.

        Args:
            control: the message.
            flush_cache: forget cached prefixes, which belong to the old weights. Fails with requests held by
                `pause("in_place")`.

        `weight_version` is left out: SGLang would take the new name on even when the loader has failed.
        """
        body = {"serialized_named_tensors": payload(control), "load_format": LOADER, "flush_cache": flush_cache}
        self._post("/update_weights_from_tensor", body)

    def load_weights_from_disk(self, folder: str) -> None:
        """Load a Hugging Face folder, as a cold start would."""
        # not the server's, which may be dummy
        self._post("/update_weights_from_disk", {"model_path": folder, "load_format": "auto"})

    def set_weight_version(self, version: int | str) -> None:
        """Name the weights now loaded; later tokens carry it in `Completion.weight_versions`."""
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def flush_cache(self) -> None:
        """Forget cached prefixes. Refused while requests are running; the last batch of those that have been answered
        may take a moment."""
        self._request(f"/flush_cache?timeout={_SETTLE_S}", {})

    def weights_checksum(self) -> str:
        """One checksum over all parameters of all ranks: equal exactly when the loaded weights are equal bit for
        bit."""
        answer = self._post("/weights_checker", {"action": "checksum"})
        try:
            return str(answer["per_engine_checksum"])
        except KeyError as error:
            raise EngineError("/weights_checker answered without a checksum", engine=self.name) from error

    # ---- transport

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A control call: SGLang answers `{success, message}`, with 200 or 400."""
        answer = self._call(path, body)
        if not isinstance(answer, dict):
            raise EngineError(f"{path} failed: answered {type(answer).__name__}", engine=self.name)
        if answer.get("success") is False:
            raise EngineError(f"{path} failed: {answer.get('message', 'no reason given')}", engine=self.name)
        return answer

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._request(path, body)
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(f"{path} answered no JSON: {answer.text[:200]!r}", engine=self.name) from error

    def _request(self, path: str, body: dict[str, Any]) -> requests.Response:
        timeout_s = self.request_timeout_s
        try:
            answer = self._session().post(
                self.url + path, json=body, headers=self._headers, timeout=timeout_s, allow_redirects=False
            )
        except requests.Timeout as error:
            raise EngineSilent(f"{path} not answered within {timeout_s:g} s", engine=self.name) from error
        except requests.RequestException as error:
            raise EngineSilent(f"{path}: no connection: {error}", engine=self.name) from error
        if answer.status_code != 200:
            raise EngineError(f"{path} answered {answer.status_code}: {answer.text[:500]}", engine=self.name)
        return answer

    def _session(self) -> requests.Session:
        session = getattr(self._local, "session", None)
        if session is None:
            session = requests.Session()
            session.trust_env = False  # a proxy of the environment must not see, nor break, calls to this machine
            self._local.session = session
        return session
