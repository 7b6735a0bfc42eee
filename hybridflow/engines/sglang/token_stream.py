"""How SGLang is asked for tokens (`engines.token_stream`). Log-probabilities come packed (`packed_answers`)."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.engines.sglang.packed_answers import LOG_PROBS
from hybridflow.engines.token_stream import Asked, TokenStreams
from hybridflow.errors import EngineError

EVENT_TOKENS = 256  # an answer is heard of at its first token, after so many more, and at its end
_REFUSED = 400  # status of a request that SGLang ends with an error of its own, as HTTP has them


class SglangStreams(TokenStreams):
    """The requests for tokens to one SGLang server."""

    def _body(self, asked: Asked, numbers: range) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": [asked.names[number] for number in numbers],
            "input_ids": [asked.prompts[number] for number in numbers],
            "sampling_params": [asked.parameters[number] | {"stream_interval": EVENT_TOKENS} for number in numbers],
            "return_logprob": True,
            "stream": True,
        }
        return body | ({"return_routed_experts": True} if asked.with_routes else {})

    def _read(self, asked: Asked, event: Any, names: Mapping[str, int]) -> str:
        meta = event["meta_info"]
        name, ended = meta["id"], meta["finish_reason"]
        if ended is not None and (ended.get("status_code") or 0) >= _REFUSED:
            raise EngineError(f"{self.path} refused: {str(ended.get('message'))[:500]}", engine=self.name)
        answer = asked.answers[names[name]]
        tokens = np.array(event["output_ids"], dtype=np.int64)
        log_probs = np.frombuffer(base64.b64decode(meta[LOG_PROBS]), dtype=np.float32)
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
        answer.routes = meta.get("routed_experts")
        answer.add(tokens, log_probs, ended["type"] if ended is not None else "", spans)
        return str(name)

    async def _call_off(self, names: Sequence[str]) -> None:
        for name in names:
            await self._tell("/abort_request", {"rid": name})
