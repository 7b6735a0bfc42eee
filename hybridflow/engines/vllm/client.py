"""HTTP client of one vLLM server: token ids in and out, and the control calls of a weight sync.

Log-probs: the server runs with `--logprobs-mode processed_logprobs`, which returns log-probs of the
sampling distribution: log softmax(logits / temperature) without truncation, and log softmax(logits)
at temperature 0. With top-k or top-p, they would be log-probs of the truncated distribution,
contrary to the specification of `Completion`, so such requests are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridflow.engines.base import TokenRequests
from hybridflow.engines.served_engine import ServerClient
from hybridflow.engines.token_stream import Asked, TokenStreams
from hybridflow.errors import EngineError

if TYPE_CHECKING:
    from hybridflow.sync.session import Control, PauseMode

RPC = "take_weight_message"  # method of `worker.WeightExtension`
# prefix that vLLM adds to request names (scale_out/token_in_token_out/serving.py)
_PREFIX = "generate-tokens-"
_PAUSE = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class VllmStreams(TokenStreams):
    """Token requests to one vLLM server, with one prompt per request."""

    path = "/inference/v1/generate"
    version = ""  # current weight version, because vLLM reports it only with the last token

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
    """HTTP client of one vLLM server, with one prompt per request."""

    streams = VllmStreams
    together = 1

    def _parameters(self, requests: TokenRequests, limit: int) -> dict[str, Any]:
        sampling = requests.sampling
        if requests.extras.routes:
            raise EngineError("returning routed experts is not supported", engine=self.name)
        if sampling.stop:
            raise EngineError(
                f"stop strings are not supported, got stop={list(sampling.stop)}; remove them",
                engine=self.name,
            )
        if sampling.temperature > 0 and (
            sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        ):
            raise EngineError(
                f"with top_p={sampling.top_p} and top_k={sampling.top_k}, vLLM returns log-probs "
                "of the truncated distribution, which the trainer does not compute; set top_p=1 "
                "and top_k=-1 in rollout.sampling and rollout.val_sampling, or choose another "
                "rollout.engine",
                engine=self.name,
            )
        return {
            "temperature": sampling.temperature,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": int(limit),
            "logprobs": 0,  # only for the sampled token
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
        """Reallocate memory for these parts. Weights must be sent before the next request."""
        self._request("/wake_up?" + "&".join(f"tags={tag}" for tag in tags), {})

    # ---- weights

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. `Order.pause` describes the modes. `call_ranks` drops the KV cache of
        retracted requests."""
        self._request(f"/pause?mode={_PAUSE[mode]}", {})

    def resume(self) -> None:
        """Continue generating after `pause`."""
        self._request("/resume", {})

    def begin_weight_update(self) -> None:
        """Do nothing, because vLLM needs no session for `call_ranks`."""

    def end_weight_update(self) -> None:
        """Do nothing, like `begin_weight_update`."""

    def call_ranks(self, control: Control, *, flush_cache: bool = True) -> None:
        """Deliver a message to HybridFlow's code in every rank, and wait until all have handled it.
        The ranks report through the weight-sync store.

        Args:
            control: the message.
            flush_cache: drop the KV cache computed with the old weights, including the cache of
                waiting requests.
        """
        self._request("/collective_rpc", {"method": RPC, "args": [control.to_json()]})
        if flush_cache and not self._call(
            "/reset_prefix_cache?reset_running_requests=true", {}
        ).get("success"):
            raise EngineError(
                "/reset_prefix_cache failed: the KV cache of the old weights is still in use",
                engine=self.name,
            )

    def set_weight_version(self, version: int | str) -> None:
        """Set the version of the loaded weights. It is reported for later tokens in
        `Completion.weight_versions`."""
        self._request("/update_weight_version", {"new_version": str(version)})
