"""Conversion of a policy's answer to OpenAI's chat completion format."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from hybridflow.agents.call_reading import read_calls, while_others_go_on
from hybridflow.agents.completion_request import ChatRequest
from hybridflow.agents.conversation import Conversation


async def next_answer(
    conversation: Conversation, asked: ChatRequest, model: str, call_id: Callable[[int], str]
) -> dict[str, Any]:
    """Sample the next answer of a conversation and return it as a completion.

    Args:
        call_id: returns an id for the answer's n-th tool call; used if the answer itself contains
            no ids.

    Raises:
        ConversationOver: there is no room for an answer.
    """
    before = len(conversation.prompt) + len(conversation.tokens)
    text = await conversation.answer(asked.most, asked.stop)
    calls = await while_others_go_on(
        lambda said: _tool_calls(conversation, said, asked, call_id), text
    )
    conversation.calls += len(calls)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reason = conversation.finish_reason
    if calls:
        message["tool_calls"] = calls
        reason = "tool_calls"
    after = len(conversation.prompt) + len(conversation.tokens)
    sampled = after - before
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    if asked.logprobs:
        choice["logprobs"] = {"content": _log_probs(conversation, sampled), "refusal": None}
    completion: dict[str, Any] = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": after},
    }
    if asked.ignored:
        completion["ignored"] = list(asked.ignored)
    return completion


def _log_probs(conversation: Conversation, sampled: int) -> list[dict[str, Any]]:
    """Return the conversation's last `sampled` tokens and their log-probabilities, without the stop
    token."""
    ids = conversation.tokens[-sampled:]
    log_probs = conversation.log_probs[-sampled:]
    if ids and ids[-1] in conversation.tokenizer.stop_ids:
        ids = ids[:-1]
        log_probs = log_probs[:-1]
    found = []
    for token, value in zip(ids, log_probs, strict=True):
        text = conversation.tokenizer.decode([token])
        encoded = list(text.encode())
        found.append({"token": text, "logprob": value, "bytes": encoded, "top_logprobs": []})
    return found


def _tool_calls(
    conversation: Conversation, text: str, asked: ChatRequest, call_id: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return the tool calls in the text in OpenAI's format, or an empty list if any call cannot be
    parsed.
    """
    if not asked.tools or not asked.reads_calls:
        return []
    tools = {}
    for one in asked.tools:
        function = one["function"]
        tools[str(function["name"])] = function.get("parameters", {})
    opened = conversation.tokenizer.template.opens_thinking
    found = read_calls(conversation.config.call_format, text, tools, thinking_open=opened)
    if any(call.problem for call in found):
        return []
    calls = []
    for number, call in enumerate(found[: asked.most_calls]):
        arguments = json.dumps(dict(call.arguments))
        function = {"name": call.name, "arguments": arguments}
        name = call.id or call_id(number)
        calls.append({"id": name, "type": "function", "function": function})
    return calls
