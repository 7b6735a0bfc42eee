"""HTTP client of one vLLM server: token ids in and out, and the control calls of a weight sync.

Log-probabilities: the server runs with `--logprobs-mode processed_logprobs`, i.e. those of the
distribution that was sampled from: log softmax(logits / temperature) without truncation, and log
softmax(logits) at temperature 0. With top-k or top-p they would be those of the truncated
distribution, unlike `Completion` specifies, so such requests are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.engines.asking import TokenRequests
from hybridflow.engines.control import Control, PauseMode
from hybridflow.engines.http_client import ServerClient
from hybridflow.engines.token_stream import Asked, TokenStreams
from hybridflow.errors import EngineError

RPC = "take_weight_message"  # of `worker.WeightExtension`
# prefix that vLLM adds to request names (scale_out/token_in_token_out/serving.py)
_PREFIX = "generate-tokens-"
_PAUSE = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class VllmStreams(TokenStreams):
    """Token requests to one vLLM server, one prompt each."""

    path = "/inference/v1/generate"
    version = ""  # of the current weights: vLLM reports it only with the last token

    def _body(self, asked: Asked, numbers: range) -> dict[str, Any]:
        (number,) = numbers
        name = asked.names[number]
        tokens = asked.prompts[number]
        return {
            "request_id": name,
            "token_ids": tokens,
            "sampling_params": asked.parameters[number],
            "stream": True,
        }

    def _read(self, asked: Asked, event: Any, names: Mapping[str, int]) -> str:
        name = str(event["request_id"]).removeprefix(_PREFIX)
        answer = asked.answers[names[name]]
        choices = event["choices"]
        for choice in choices:
            log_probs = choice["logprobs"]["content"] if choice["logprobs"] else []
            spans = choice["weight_versions"] or answer.continued(self.version)
            answer.add(
                np.array(choice["token_ids"], dtype=np.int64),
                np.array([one["logprob"] for one in log_probs], dtype=np.float32),
                choice["finish_reason"] or "",
                spans,
            )
        return name

    async def _call_off(self, names: Sequence[str]) -> None:
        await self._tell(
            "/inference/v1/abort_requests", {"request_ids": [_PREFIX + name for name in names]}
        )


class VllmClient(ServerClient):
    """Client of one vLLM server, with one prompt per HTTP request."""

    streams = VllmStreams
    together = 1

    def _parameters(self, requests: TokenRequests, limit: int) -> dict[str, Any]:
        sampling = requests.sampling
        if requests.extras.routes:
            raise EngineError("does not return the experts of tokens", engine=self.name)
        if sampling.stop:
            raise EngineError(
                f"does not support stop strings, stop={list(sampling.stop)}; remove them",
                engine=self.name,
            )
        if sampling.temperature > 0 and (
            sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        ):
            raise EngineError(
                f"vLLM's log-probs with top_p={sampling.top_p} and top_k={sampling.top_k} are "
                "those of the truncated distribution, which a trainer does not compute; set "
                "top_p=1 and top_k=-1 in rollout.sampling and rollout.val_sampling, or choose "
                "another rollout.engine",
                engine=self.name,
            )
        return {
            "temperature": sampling.temperature,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": int(limit),
            "logprobs": 0,  # only the sampled token's
            "stop_token_ids": [int(token) for token in requests.stop_token_ids],
            # a response ends only at the requested stop tokens
            "ignore_eos": True,
            "detokenize": False,
        }

    # ---- memory

    def release_memory(self) -> None:
        """Release the device memory of weights and KV cache. On CPU vLLM reports success but frees
        nothing."""
        self._request("/sleep?level=2", {})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of these parts again. Weights must be sent before the next
        request."""
        self._request("/wake_up?" + "&".join(f"tags={tag}" for tag in tags), {})

    # ---- weights

    def pause(self, mode: PauseMode) -> None:
        """Stop generating; `Order.pause` documents the modes. Retracted requests lose their KV
        cache in `call_ranks`."""
        self._request(f"/pause?mode={_PAUSE[mode]}", {})

    def resume(self) -> None:
        """Continue generating after `pause`."""
        self._request("/resume", {})

    def begin_weight_update(self) -> None:
        """Do nothing: vLLM needs no session for `call_ranks`."""

    def end_weight_update(self) -> None:
        """Do nothing, like `begin_weight_update`."""

    def call_ranks(self, control: Control, *, flush_cache: bool = True) -> None:
        """Deliver a message to our code in every rank, and wait until all have handled it. They
        report through the sync's store.

        Args:
            control: the message.
            flush_cache: drop the KV cache of the old weights, also of waiting requests.
        """
        self._request("/collective_rpc", {"method": RPC, "args": [control.to_json()]})
        if flush_cache and not self._call(
            "/reset_prefix_cache?reset_running_requests=true", {}
        ).get("success"):
            raise EngineError(
                "/reset_prefix_cache failed: the KV cache of the old weights is in use",
                engine=self.name,
            )

    def set_weight_version(self, version: int | str) -> None:
        """Name the loaded weights; later tokens carry the name in `Completion.weight_versions`."""
        self._request("/update_weight_version", {"new_version": str(version)})
