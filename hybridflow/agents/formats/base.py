"""What reads the calls of tools out of an answer, and how such a format is registered."""

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
    """A call as an answer writes it.

    Attributes:
        arguments: by name. With `is_text` they are as they were written, and the tool's declaration
            says what they are.
        problem: what is wrong with one that cannot be read; the policy is told.
        id: as the answer writes it; empty where the format has none.
        span: where it begins and ends in the text, whose markers of a thinking are text then; not
            compared.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    id: str = ""
    is_text: bool = False
    span: tuple[int, int] = field(default=(0, 0), compare=False)


MOST_CALLS = 1000  # of an answer that are read; more are written by a policy that repeats itself
# calls of an answer that cannot be read before reading stops: each error of Python's decoder counts
# the lines before it
MOST_UNREAD = 100


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text[:40])


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)

# (answer, {name of a tool: names of its parameters}) -> the calls in it, in order
CallFormat = Callable[[str, Mapping[str, Sequence[str]]], list[Call]]
FORMATS: Registry[CallFormat] = Registry(
    CALL_FORMAT.kind, CALL_FORMAT.package, "rollout.agent.call_format"
)


def call_format(name: str) -> Callable[[CallFormat], CallFormat]:
    """Register a function as the format of this name."""
    return FORMATS.entry(name, lambda function: function)


def json_at(text: str, place: int) -> tuple[Any, int]:
    """The JSON value that begins at `place`, and where it ends. ValueError: there is none, or it
    holds a number that is not finite."""
    try:
        return _DECODER.raw_decode(text, place)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_call(found: Any, arguments_key: str) -> Call:
    """The call in a JSON object {"name": ..., arguments_key: {...}}."""
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        return Call("", problem='the call is no JSON object with a "name"')
    return with_arguments(name, found.get(arguments_key, {}))


def with_arguments(name: str, arguments: Any, number: str = "") -> Call:
    """The call of `name` with arguments as an object, or as JSON of one; `number` is its id."""
    if isinstance(arguments, str):
        try:
            arguments, _ = json_at(arguments, len(arguments) - len(arguments.lstrip()))
        except ValueError as error:
            return Call(name, problem=f"the arguments of {name} are no JSON ({error})", id=number)
    if not isinstance(arguments, dict):
        return Call(name, problem=f"the arguments of {name} are no JSON object", id=number)
    return Call(name, arguments, id=number)
