"""Streamed answers of SGLang with their log-probabilities in binary. Part of the plugin, in the server's process.

SGLang answers a list [log-probability, token, text] for each token (sglang/srt/managers/tokenizer_manager.py:2860),
about 30 bytes of JSON and five Python objects; packed it is four bytes, base64.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

LOG_PROBS = "packed_log_probs"  # in meta_info: base64 of float32, one for each of output_ids
_LISTED = "output_token_logprobs"


def pack_answers() -> None:
    """Have the server pack the answers that it streams."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response"
    HookRegistry.register(target, packed, HookType.AROUND)


async def packed(
    original: Callable[..., AsyncIterator[dict[str, Any]]], manager: Any, request: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[dict[str, Any]]:
    """The events of one response. Experts come once, with the last one."""
    async for event in original(manager, request, *args, **kwargs):
        meta = event.get("meta_info", {})
        if getattr(request, "stream", False) and _LISTED in meta:
            pack(meta)
        yield event


def pack(meta: dict[str, Any]) -> None:
    """Replace the lists of log-probabilities by `LOG_PROBS`."""
    values = np.array([entry[0] for entry in meta.pop(_LISTED)], dtype=np.float32)
    meta[LOG_PROBS] = base64.b64encode(values.tobytes()).decode()
    meta.pop("input_token_logprobs", None)
    if meta["finish_reason"] is None:
        meta.pop("routed_experts", None)
