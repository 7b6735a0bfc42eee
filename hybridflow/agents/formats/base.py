"""The interface of a tool-call format: a parser for the tool calls in an answer, registered by
name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.keys import CALL_FORMAT
from hybridflow.config.registry import Registry


@dataclass(frozen=True)
class Call:
    """A parsed tool call.

    Attributes:
        arguments: arguments keyed by name. If `is_text` is True, the values are still text and must
            be converted to the types that the tool declares.
        problem: the parse error shown to the policy; empty if the call was parsed.
        id: the call's id in the answer; empty if the format has none.
        span: start and end of the call in the text. Thinking markers inside the span are plain
            text. Calls that differ only in `span` are equal.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    id: str = ""
    is_text: bool = False
    span: tuple[int, int] = field(default=(0, 0), compare=False)


MOST_CALLS = 1000  # calls parsed per answer; a policy that repeats itself may write more
# parsing stops after this many unparsable calls: for each error, Python's decoder counts the lines
# before it
MOST_UNREAD = 100


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text[:40])


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)

# (answer, {tool name: its parameter names}) -> the calls in the answer, in order
CallFormat = Callable[[str, Mapping[str, Sequence[str]]], list[Call]]
FORMATS: Registry[CallFormat] = Registry(
    CALL_FORMAT.kind, CALL_FORMAT.package, "rollout.agent.call_format"
)


def call_format(name: str) -> Callable[[CallFormat], CallFormat]:
    """Register a function as the format with this name."""
    return FORMATS.entry(name, lambda function: function)


def json_at(text: str, place: int) -> tuple[Any, int]:
    """Parse the JSON value at `place`. Returns the value and the position after it.

    Raises:
        ValueError: there is no value, or it contains a non-finite number.
    """
    try:
        return _DECODER.raw_decode(text, place)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def json_call(found: Any, arguments_key: str) -> Call:
    """Parse the call in a JSON object {"name": ..., arguments_key: {...}}."""
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        return Call("", problem='the call must be a JSON object with a "name"')
    return with_arguments(name, found.get(arguments_key, {}))


def with_arguments(name: str, arguments: Any, number: str = "") -> Call:
    """Build a call to `name`. `arguments` is an object or JSON text; `number` becomes the call's
    id.
    """
    if isinstance(arguments, str):
        try:
            arguments, _ = json_at(arguments, len(arguments) - len(arguments.lstrip()))
        except ValueError as error:
            return Call(
                name, problem=f"the arguments of {name} are not valid JSON ({error})", id=number
            )
    if not isinstance(arguments, dict):
        return Call(name, problem=f"the arguments of {name} must be a JSON object", id=number)
    return Call(name, arguments, id=number)
