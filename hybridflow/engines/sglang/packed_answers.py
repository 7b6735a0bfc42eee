"""Binary encoding of the log-probs in SGLang's streamed responses. Part of the plugin; runs in the
server's process.

SGLang sends a list [log-prob, token, text] for each token
(sglang/srt/managers/tokenizer_manager.py:2860), about 30 bytes of JSON and five Python objects.
Packed, each token takes four bytes before base64 encoding.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

# in meta_info, base64 each: float32 log-prob of each output id; int32 size of each token's support;
# int32 ids of the supports' tokens
LOG_PROBS = "packed_log_probs"
SUPPORT_SIZES = "packed_support_sizes"
SUPPORT_IDS = "packed_support_ids"
_LISTED = "output_token_logprobs"
_SUPPORT = "output_token_sampling_mask"
_AMONG = "output_token_sampling_logprobs"


def pack_answers() -> None:
    """Patch the server to pack the responses that it streams."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response"
    HookRegistry.register(target, packed, HookType.AROUND)


async def packed(
    original: Callable[..., AsyncIterator[dict[str, Any]]],
    manager: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of one response with packed log-probs. Routed experts are sent only with the
    last event."""
    async for event in original(manager, request, *args, **kwargs):
        meta = event.get("meta_info", {})
        if getattr(request, "stream", False) and _LISTED in meta:
            pack(meta)
        yield event


def pack(meta: dict[str, Any]) -> None:
    """Replace the lists of log-probs with `LOG_PROBS`. If supports are requested, the log-probs are
    normalised over them."""
    values = [entry[0] for entry in meta.pop(_LISTED)]
    if (supports := meta.pop(_SUPPORT, None)) is not None:
        values = meta.pop(_AMONG)
        meta[SUPPORT_SIZES] = _encoded(list(map(len, supports)), np.int32)
        meta[SUPPORT_IDS] = _encoded(list(chain.from_iterable(supports)), np.int32)
    meta[LOG_PROBS] = _encoded(values, np.float32)
    meta.pop("input_token_logprobs", None)
    if meta["finish_reason"] is None:
        meta.pop("routed_experts", None)


def _encoded(values: Sequence[Any], kind: type) -> str:
    return base64.b64encode(np.array(values, dtype=kind).tobytes()).decode()
