"""Validation of requests to OpenAI's chat completions API: every field is either honoured or
rejected with an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_STOPS = 4
# sampling is set by the run, because the policy must be trained on the distribution that it was
# sampled from
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
# fields that do not affect the answer
_OF_THE_SENDER = (
    *(
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    ),
    "prompt_cache_retention",
)
# {field: (values that have no effect, why others are rejected)}
_FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "must be 1: a conversation generates one answer at a time"),
    "top_logprobs": (
        (0,),
        "must be 0: the engines return log-probabilities only of sampled tokens",
    ),
    "response_format": (
        ({"type": "text"},),
        'must be {"type": "text"}: a grammar would change the sampling distribution',
    ),
    "presence_penalty": ((0,), "must be 0: the policy is sampled without penalties"),
    "frequency_penalty": ((0,), "must be 0: the policy is sampled without penalties"),
    "repetition_penalty": ((1,), "must be 1: the policy is sampled without penalties"),
    "logit_bias": (({},), "must be empty: it would change the sampling distribution"),
    "chat_template_kwargs": (
        ({},),
        "must be empty: the row's prompt was rendered without such arguments",
    ),
    "modalities": ((["text"],), 'must be ["text"]'),
    "functions": (([],), "was replaced by tools; send tools instead"),
    "function_call": ((), "was replaced by tool_choice; send tool_choice instead"),
}
# further sampling fields that a model's server honours
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_IGNORED = ("seed",)
_READ = (
    *(
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stop",
    ),
    *("logprobs", "stream", "stream_options"),
)


class RequestError(Exception):
    """Raised for an invalid request; the client receives an HTTP status and the name of the invalid
    field."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True)
class ChatRequest:
    """A validated request.

    Attributes:
        messages: the messages, each with role, text content and, if given, `tool_calls`,
            `tool_call_id` and `name`.
        tools: function declarations.
        reads_calls: parse tool calls from the answer (`tool_choice` is not none).
        most_calls: maximum number of calls to return; None returns all.
        most: maximum number of tokens in the answer; None means as many as still fit.
        stop: stop strings.
        logprobs: return the log-probability of each token.
        stream: send the answer as server-sent events.
        with_usage: send the token usage as the last event.
        ignored: sampling fields that the run overrides.
        sampling: sampling fields that are applied.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    reads_calls: bool
    most_calls: int | None
    most: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    with_usage: bool
    ignored: tuple[str, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_request(body: Any, *, own_sampling: bool = False) -> ChatRequest:
    """Parse a JSON body.

    Args:
        own_sampling: True to honour the request's sampling fields; False if the run's configuration
            determines the sampling.

    Raises:
        RequestError: a field cannot be honoured.
    """
    if (
        not isinstance(body, dict)
        or not isinstance(body.get("messages"), list)
        or not body["messages"]
    ):
        raise RequestError("messages is required and must be a list of messages", param="messages")
    given = {name: value for name, value in body.items() if value is not None}
    honoured = (*_SAMPLING, *_PENALTIES) if own_sampling else ()
    for name, value in given.items():
        if name not in honoured:
            _check(name, value)
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(
            "tool_choice must be auto or none; forced calls are not supported", param="tool_choice"
        )
    limits = [
        _whole(given, name) for name in ("max_completion_tokens", "max_tokens") if name in given
    ]
    ignored = _IGNORED if own_sampling else _SAMPLING
    return ChatRequest(
        messages=[_message(number, one) for number, one in enumerate(given["messages"])],
        tools=_tools(given.get("tools", [])),
        reads_calls=choice == "auto",
        most_calls=None if _flag(given, "parallel_tool_calls", True) else 1,
        most=min(limits, default=None),
        stop=_stops(given.get("stop", [])),
        logprobs=_flag(given, "logprobs", False),
        stream=_flag(given, "stream", False),
        with_usage=_flag(_stream_options(given), "include_usage", False),
        ignored=tuple(name for name in ignored if name in given),
        sampling={name: given[name] for name in honoured if name in given and name not in _IGNORED},
    )


def _stream_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise RequestError(
            "stream_options must be an object with include_usage as its only key",
            param="stream_options",
        )
    return options


def _check(name: str, value: Any) -> None:
    if name in _FIXED:
        values, why = _FIXED[name]
        if isinstance(value, bool) or value not in values:
            raise RequestError(f"{name} {why}", param=name)
    elif name not in (*_READ, *_SAMPLING, *_OF_THE_SENDER):
        raise RequestError(f"{name} is not supported; remove it", param=name)


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    found = given.get(name, default)
    if not isinstance(found, bool):
        raise RequestError(f"{name} must be true or false", param=name)
    return found


def _whole(given: Mapping[str, Any], name: str) -> int:
    most = given[name]
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise RequestError(f"{name} must be a whole number of at least 1", param=name)
    return most


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(one, str) and one for one in stops)
    ):
        raise RequestError(
            f"stop must be a string or a list of at most {_MOST_STOPS} strings", param="stop"
        )
    return tuple(stops)


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    if not isinstance(tools, list) or not all(
        isinstance(one, dict) and _declares(one.get("function")) for one in tools
    ):
        raise RequestError("tools must be a list of function declarations", param="tools")
    return tools


def _declares(function: Any) -> bool:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    parameters = function.get("parameters", {})
    return isinstance(parameters, dict) and isinstance(parameters.get("properties", {}), dict)


def _message(number: int, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"message {number} has no role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
        ):
            raise RequestError(f"message {number}: content parts must be text", param="messages")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"message {number}: content must be text", param="messages")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(one, dict) for one in calls):
        raise RequestError(
            f"message {number}: tool_calls must be a list of tool calls", param="messages"
        )
    known = {
        name: message[name]
        for name in ("tool_call_id", "name")
        if isinstance(message.get(name), str)
    }
    found = {"role": message["role"], "content": content or "", **known}
    return {**found, "tool_calls": calls} if calls else found
