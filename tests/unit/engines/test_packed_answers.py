"""What the server does with the answers that it streams, and what it leaves alone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridflow.engines.sglang.server_changes import LOG_PROBS, SUPPORT_IDS, SUPPORT_SIZES, packed


def through(stream: bool, *metas: dict[str, Any]) -> list[dict[str, Any]]:
    async def original(_: Any, __: Any, which: str) -> AsyncIterator[dict[str, Any]]:
        assert which == "third"
        for meta in metas:
            yield {"output_ids": [7], "meta_info": dict(meta)}

    async def collect() -> list[dict[str, Any]]:
        events = packed(original, None, SimpleNamespace(stream=stream), "third")
        return [event["meta_info"] async for event in events]

    return asyncio.run(collect())


def meta_of(reason: Any) -> dict[str, Any]:
    listed = [[-0.1234567, 7, None], [-3.5, 8, None]]
    return {"finish_reason": reason, "output_token_logprobs": listed, "routed_experts": "AAAA"}


def test_streamed_log_probs_are_packed_and_experts_come_once() -> None:
    first, last = through(True, meta_of(None), meta_of({"type": "stop"}))
    assert "routed_experts" not in first and last["routed_experts"] == "AAAA"
    for meta in (first, last):
        values = np.frombuffer(base64.b64decode(meta[LOG_PROBS]), np.float32)
        assert values.tolist() == np.array([-0.1234567, -3.5], np.float32).tolist()
        assert "output_token_logprobs" not in meta


def test_supports_are_packed_with_the_log_probs_over_them() -> None:
    supports = [[7, 3], [8]]
    among = [-0.5, 0.0]
    given = meta_of(None) | {
        "output_token_sampling_mask": supports,
        "output_token_sampling_logprobs": among,
    }
    [meta] = through(True, given)
    found = {
        name: np.frombuffer(base64.b64decode(meta[name]), np.int32)
        for name in (SUPPORT_SIZES, SUPPORT_IDS)
    }
    assert [one.tolist() for one in found.values()] == [[2, 1], [7, 3, 8]]
    assert np.frombuffer(base64.b64decode(meta[LOG_PROBS]), np.float32).tolist() == among
    assert not meta.keys() & {"output_token_sampling_mask", "output_token_sampling_logprobs"}


def test_other_answers_stay_as_they_are() -> None:
    assert through(False, meta_of(None)) == [meta_of(None)]
    assert through(True, {"finish_reason": None}) == [{"finish_reason": None}]


@pytest.mark.slow
def test_the_hook_finds_what_it_wraps() -> None:
    manager = pytest.importorskip("sglang.srt.managers.tokenizer_manager", exc_type=ImportError)
    assert callable(manager.TokenizerManager._wait_one_response)
