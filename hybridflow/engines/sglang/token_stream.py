"""SGLang's token protocol (`engines.token_stream`). Log-probs arrive packed (`packed_answers`)."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hybridflow.batch import Supports
from hybridflow.engines.sglang.image_data import encode
from hybridflow.engines.sglang.packed_answers import LOG_PROBS, SUPPORT_IDS, SUPPORT_SIZES
from hybridflow.engines.token_stream import Asked, TokenStreams
from hybridflow.errors import EngineError

EVENT_TOKENS = 256  # tokens between events; the first token and the last also send one
_REFUSED = 400  # statuses from this one upward mean that SGLang ended the request with an error
# start of the error message if the next token's support is larger than --sampling-mask-max-tokens;
# that token is dropped, and the earlier ones are valid
# (managers/scheduler_components/batch_result_processor.py:1333)
_OVERFLOW = "Sampling support exceeds"
# a response's number of drafted tokens, and of passes that accepted 0, 1, 2, ... of a draft
# (managers/tokenizer_manager.py:3171 and 3196)
_DRAFTED = "spec_num_proposed_drafts"
_ACCEPTED = "spec_correct_drafts_histogram"


class SglangStreams(TokenStreams):
    """Token requests to one SGLang server."""

    reads_images = True
    image_dtype = "float32"  # of the server's vision tower
    # of the requests that ended since `take_prefix_hits`. The server's own rate is only computed
    # with --enable-metrics, which needs prometheus_client
    _prompt_tokens = 0
    _cached_tokens = 0
    # of the same requests: drafted tokens, and passes by how many tokens of a draft they accepted
    _drafted = 0
    _passes: Mapping[int, int] = MappingProxyType({})

    def take_prefix_hits(self) -> float | None:
        """Return the fraction of prompt tokens found in the prefix cache, over all requests since
        the last call; None if there were none.
        """
        read, self._prompt_tokens = self._prompt_tokens, 0
        cached, self._cached_tokens = self._cached_tokens, 0
        return cached / read if read else None

    def take_drafts(self) -> dict[str, float]:
        """Return {accepted_drafts: fraction of drafted tokens that were accepted, tokens_per_pass:
        mean number of tokens per verification pass}, over all requests since the last call; empty
        if nothing was drafted. If drafts have several tokens, `accepted_drafts/depth_K` is the
        fraction of passes that accepted at least the first K tokens of the draft.
        """
        drafted, self._drafted = self._drafted, 0
        passes, self._passes = self._passes, {}
        count = sum(passes.values())
        if not count:
            return {}
        depths = range(1, drafted // count + 1)
        accepted = [sum(n for most, n in passes.items() if most >= depth) for depth in depths]
        found = {
            "accepted_drafts": sum(accepted) / drafted,
            "tokens_per_pass": 1 + sum(accepted) / count,
        }
        if len(depths) > 1:
            for depth, number in zip(depths, accepted, strict=True):
                found[f"accepted_drafts/depth_{depth}"] = number / count
        return found

    def _count_drafts(self, meta: dict[str, Any]) -> None:
        self._drafted += int(meta.get(_DRAFTED) or 0)
        passes = dict(self._passes)
        for accepted, count in enumerate(meta.get(_ACCEPTED) or ()):
            passes[accepted] = passes.get(accepted, 0) + int(count)
        self._passes = passes

    def _body(self, asked: Asked, numbers: range) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": [asked.names[number] for number in numbers],
            "input_ids": [asked.prompts[number] for number in numbers],
            "sampling_params": [
                asked.parameters[number] | {"stream_interval": EVENT_TOKENS} for number in numbers
            ],
            "return_logprob": True,
            "stream": True,
        }
        if asked.images:
            images = [asked.images[number] for number in numbers]
            body["image_data"] = encode(images, self.image_dtype)
        wanted = {
            "return_routed_experts": asked.extras.routes,
            "return_sampling_mask": asked.extras.support,
        }
        return body | {name: True for name, value in wanted.items() if value}

    def _read(self, asked: Asked, event: Any, names: Mapping[str, int]) -> str:
        meta = event["meta_info"]
        name = meta["id"]
        ended = meta["finish_reason"]
        if ended is not None and (ended.get("status_code") or 0) >= _REFUSED:
            message = str(ended.get("message"))
            if not message.startswith(_OVERFLOW):
                raise EngineError(f"{self.path} failed: {message[:500]}", engine=self.name)
        if ended is not None:
            self._prompt_tokens += len(asked.prompts[names[name]])
            self._cached_tokens += int(meta.get("cached_tokens") or 0)
            self._count_drafts(meta)
        answer = asked.answers[names[name]]
        tokens = np.array(event["output_ids"], dtype=np.int64)
        log_probs = _decoded(meta, LOG_PROBS, np.float32)
        supports = None
        if asked.extras.support:
            supports = Supports(
                *(_decoded(meta, name, np.int32) for name in (SUPPORT_SIZES, SUPPORT_IDS))
            )
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
        answer.routes = meta.get("routed_experts")
        answer.add(tokens, log_probs, ended["type"] if ended is not None else "", spans, supports)
        return str(name)

    async def _call_off(self, names: Sequence[str]) -> None:
        for name in names:
            await self._tell("/abort_request", {"rid": name})


def _decoded(meta: Mapping[str, Any], name: str, kind: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(meta.get(name, "")), dtype=kind)
