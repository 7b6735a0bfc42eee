"""HTTP client of one SGLang server: generation and the weight-update session. JSON only; every call has a deadline.

Log-probabilities: SGLang returns, for each generated token, log softmax(logits / temperature) over the whole
vocabulary, taken *before* top-k, top-p and min-p cut the distribution (sglang/srt/layers/sampler.py, standard path). At
temperature 0 it is log softmax(logits). A trainer that recomputes them divides its logits by the same temperature and
ignores top-k and top-p.
"""

from __future__ import annotations

import base64
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import requests

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.engines.sglang.weight_control import LOADER, Control, payload
from hybridflow.errors import EngineError, EngineSilent

PauseMode = Literal["abort", "retract", "in_place"]
_ABORT_S = 5.0
_SETTLE_S = 30  # for the scheduler to let go of a batch that has been answered
FINISH_REASONS = ("stop", "length", "abort")


class EngineClient:
    """Speaks to one engine. Safe to use from several threads.

    Args:
        url: base address, e.g. `EngineServer.url`.
        admin_key: bearer key of the engine.
        request_timeout_s: deadline of each call, in seconds.
        name: the engine's name in error messages; defaults to the address.
        batch_size: prompts in one HTTP request; a longer list goes out as several requests at once.
    """

    def __init__(
        self, url: str, admin_key: str, request_timeout_s: float = 300.0, *, name: str = "", batch_size: int = 1024
    ) -> None:
        self.url, self.name = url.rstrip("/"), name or url
        self.request_timeout_s, self.batch_size = request_timeout_s, batch_size
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._local = threading.local()

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
            EngineError: refused, malformed, or not answered within `request_timeout_s`.
        """
        rows = [[int(token) for token in prompt] for prompt in prompts]
        empty = [i for i, row in enumerate(rows) if not row]
        if empty:
            raise EngineError(f"prompt {empty[0]} has no tokens", engine=self.name)
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": [int(token) for token in stop_token_ids],
        }
        chunks = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        if len(chunks) == 1:  # in this thread, whose connection is kept
            return self._generate_chunk(rows, parameters, with_routes)
        with ThreadPoolExecutor(max(1, len(chunks))) as pool:
            done = pool.map(lambda chunk: self._generate_chunk(chunk, parameters, with_routes), chunks)
            return [completion for answers in done for completion in answers]

    def _generate_chunk(
        self, prompts: list[list[int]], parameters: dict[str, Any], with_routes: bool
    ) -> list[Completion]:
        request = secrets.token_hex(8)
        names = [f"{request}-{number}" for number in range(len(prompts))]
        body: dict[str, Any] = {"rid": names, "input_ids": prompts, "sampling_params": parameters}
        body |= {"return_logprob": True} | ({"return_routed_experts": True} if with_routes else {})
        try:
            answer = self._call("/generate", body)
        except EngineSilent:
            self._abort(names)
            raise
        if not isinstance(answer, list) or len(answer) != len(prompts):
            got = len(answer) if isinstance(answer, list) else type(answer).__name__
            raise EngineError(f"/generate answered {got} for {len(prompts)} prompts", engine=self.name)
        try:
            completions = [_completion(item) for item in answer]
            if not with_routes:
                return completions
            rows = zip(completions, answer, prompts, strict=True)
            return [_routed(completion, item, len(prompt)) for completion, item, prompt in rows]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(
                f"/generate answered something unexpected: {type(error).__name__}: {error}", engine=self.name
            ) from error

    def _abort(self, names: Sequence[str]) -> None:
        """Have an engine that answers too late, but still runs, give up requests that nobody waits for any longer."""
        client = self.with_timeout(_ABORT_S)
        with suppress(EngineError):
            for name in names:
                client._request("/abort_request", {"rid": name})

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


def _completion(item: dict[str, Any]) -> Completion:
    meta = item["meta_info"]
    tokens = [int(token) for token in item["output_ids"]]
    log_probs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
    if len(log_probs) != len(tokens):
        raise ValueError(f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    reason = meta["finish_reason"]["type"]
    if reason not in FINISH_REASONS:
        raise ValueError(f"finish reason {reason!r}")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    return Completion(
        tokens, log_probs, reason, tuple(WeightSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans)
    )


def _routed(completion: Completion, item: dict[str, Any], prompt_tokens: int) -> Completion:
    """With the experts of each token but the last (base64 of int32,
    sglang/srt/state_capturer/routed_experts.py:166)."""
    encoded = item["meta_info"].get("routed_experts")
    if encoded is None:
        if completion.token_ids:
            raise ValueError(
                "no routed experts; the engine needs EngineSpec.return_routed_experts and a mixture of experts"
            )
        return completion
    flat, rows = (
        np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32),
        prompt_tokens + len(completion.token_ids) - 1,
    )
    if not len(flat) or len(flat) % rows:
        raise ValueError(f"{len(flat)} routed experts for {rows} tokens")
    return replace(completion, routes=flat.reshape(rows, -1))
