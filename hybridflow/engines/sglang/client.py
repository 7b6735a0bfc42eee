"""HTTP client of one SGLang server: generation and the weight-update session. Every call has a
deadline.

Log-probs: SGLang returns, for each generated token, log softmax(logits / temperature) over the full
vocabulary, *before* top-k, top-p and min-p are applied (sglang/srt/layers/sampler.py, standard
path). At temperature 0 it is log softmax(logits). With `return_sampling_mask`, which requires a
finite top_k, it is normalised over the sampler's support instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hybridflow.engines.asking import TokenRequests
from hybridflow.engines.control import Control, PauseMode
from hybridflow.engines.http_client import ServerClient
from hybridflow.engines.load import Load
from hybridflow.engines.sglang.token_stream import SglangStreams
from hybridflow.engines.sglang.weight_control import LOADER, payload
from hybridflow.errors import EngineError

_LOAD_S = 5.0
_SETTLE_S = 30  # time for the scheduler to release an answered batch


class EngineClient(ServerClient):
    """HTTP client of one SGLang server."""

    streams = SglangStreams
    tokens: SglangStreams

    def _parameters(self, requests: TokenRequests, limit: int) -> dict[str, Any]:
        return {
            "temperature": requests.sampling.temperature,
            "top_p": requests.sampling.top_p,
            "top_k": requests.sampling.top_k,
            "min_p": requests.sampling.min_p,
            "frequency_penalty": requests.sampling.frequency_penalty,
            "presence_penalty": requests.sampling.presence_penalty,
            "repetition_penalty": requests.sampling.repetition_penalty,
            **(
                {"stop": list(requests.sampling.stop), "no_stop_trim": True}
                if requests.sampling.stop
                else {}
            ),
            "stop_token_ids": [int(token) for token in requests.stop_token_ids],
            "max_new_tokens": int(limit),
        }

    def load(self) -> Load:
        """Return the load over all of the server's data-parallel ranks
        (sglang/srt/managers/load_snapshot.py).
        """
        found = self._read("/v1/loads?include=core", _LOAD_S)
        try:
            loads = [
                Load(
                    int(one["num_running_reqs"]),
                    int(one["num_waiting_reqs"]),
                    float(one["token_usage"]),
                )
                for one in found["loads"]
            ]
            return Load(
                sum(one.running for one in loads),
                sum(one.waiting for one in loads),
                fmean(one.kv_use for one in loads),
            )
        except (TypeError, KeyError, ValueError) as error:  # `fmean` of nothing too
            raise EngineError(f"/v1/loads: {error!r}", engine=self.name) from error

    # ---- memory

    def release_memory(self, tags: Sequence[str]) -> None:
        """Release the device memory of these parts and discard their contents. Must not be called
        while requests are running.

        On CPU SGLang reports success but frees nothing, because its memory saver needs CUDA's
        virtual memory calls.
        """
        self._request("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocate memory for these parts. Weights must be sent before the next request."""
        self._request("/resume_memory_occupation", {"tags": list(tags)})

    # ---- weights

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating.

        Args:
            mode: treatment of running requests. `abort` ends them; `retract` suspends them and
                recomputes their KV cache on resume; `in_place` suspends them and keeps the KV cache
                computed with the old weights.
        """
        self._post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Continue generating after `pause`."""
        self._post("/continue_generation", {})

    def begin_weight_update(self) -> None:
        """Open the session that `call_ranks` requires. Call `pause` first; otherwise this call
        waits for the requests in flight."""
        self._post("/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close the session. While a session is open, the next `begin_weight_update` fails."""
        self._post("/end_weight_update", {})

    def call_ranks(self, control: Control, *, flush_cache: bool = True) -> None:
        """Deliver a message to HybridFlow's code in every tensor-parallel rank, and wait until all
        have handled it. The ranks report through the weight-sync store.

        Requires an open session.

        Args:
            control: the message.
            flush_cache: drop cached prefixes, because they were computed with the old weights.
                Fails while requests are paused with `pause("in_place")`. `weight_version` is not
                sent, because SGLang would adopt the new name even if the loader failed.
        """
        body = {
            "serialized_named_tensors": payload(control),
            "load_format": LOADER,
            "flush_cache": flush_cache,
        }
        self._post("/update_weights_from_tensor", body)

    def set_weight_version(self, version: int | str) -> None:
        """Set the version of the loaded weights. It is reported for later tokens in
        `Completion.weight_versions`."""
        self._post(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    def flush_cache(self) -> None:
        """Drop cached prefixes. SGLang rejects this while requests are running, and may take a
        moment to release the last completed batch.
        """
        self._request(f"/flush_cache?timeout={_SETTLE_S}", {})

    # ---- control calls

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a control call. SGLang responds with `{success, message}` and status 200 or 400."""
        answer = self._call(path, body)
        if not isinstance(answer, dict):
            raise EngineError(
                f"{path} failed: expected a JSON object, got {type(answer).__name__}",
                engine=self.name,
            )
        if answer.get("success") is False:
            raise EngineError(
                f"{path} failed: {answer.get('message', 'no reason given')}", engine=self.name
            )
        return answer
