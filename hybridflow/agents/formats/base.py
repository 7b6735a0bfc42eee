"""What reads the calls of tools out of an answer, and how such a format is registered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.keys import CALL_FORMAT
from hybridflow.config.registry import Registry


@dataclass(frozen=True)
class Call:
    """A call as an answer writes it.

    Attributes:
        problem: what is wrong with one that cannot be read; the policy is told.
        id: as the answer writes it; empty where the format has none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    id: str = ""


# (answer, {name of a tool: names of its parameters}) -> the calls in it, in order
CallFormat = Callable[[str, Mapping[str, Sequence[str]]], list[Call]]
FORMATS: Registry[CallFormat] = Registry(CALL_FORMAT.kind, CALL_FORMAT.package, "rollout.agent.call_format")


def call_format(name: str) -> Callable[[CallFormat], CallFormat]:
    """Register a function as the format of this name."""
    return FORMATS.entry(name, lambda function: function)


def blocks(text: str, begin: str, end: str, read: Callable[[str], Call], what: str) -> list[Call]:
    """The calls between `begin` and `end`, as `read` has each; one that is not closed is a problem of `what`."""
    found = re.finditer(rf"{re.escape(begin)}(.*?)({re.escape(end)}|\Z)", text, re.DOTALL)
    return [read(one[1]) if one[2] else Call("", problem=f"{what} is not closed") for one in found]


def json_call(text: str, arguments_key: str) -> Call:
    """The call in a JSON object {"name": ..., arguments_key: {...}}."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call("", problem=f"the call is no JSON ({error})")
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        return Call("", problem='the call is no JSON object with a "name"')
    return with_arguments(name, found.get(arguments_key, {}))


def with_arguments(name: str, arguments: Any) -> Call:
    """The call of `name` with arguments as an object, or as JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Call(name, problem=f"the arguments of {name} are no JSON ({error})")
    if not isinstance(arguments, dict):
        return Call(name, problem=f"the arguments of {name} are no JSON object")
    return Call(name, arguments)
