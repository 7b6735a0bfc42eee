"""Strict reading of a task's options: unknown names and wrong types are errors that name the nearest valid option."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from hybridflow.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that ends an error message about an unknown name: the nearest known one when there is one, and the
    list."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    did_you_mean = f"; did you mean {close[0]!r}?" if close else ""
    return f"{did_you_mean} (known: {', '.join(names)})"


def parse_options(schema: type, options: Mapping[str, object], task: str) -> Any:
    """An instance of the frozen dataclass `schema` from the given options.

    Raises:
        ConfigError: an unknown name, or a value whose type is not the field's (bool is not accepted for int).
    """
    types = typing.get_type_hints(schema)
    fields = {field.name for field in dataclasses.fields(schema)}
    for name, value in options.items():
        if name not in fields:
            raise ConfigError(f"unknown option data.prepare.options.{name} of task {task!r}{nearest(name, fields)}")
        expected = types[name]
        if type(value) is not expected:
            raise ConfigError(f"data.prepare.options.{name} of task {task!r} must be {expected.__name__}, is {value!r}")
    return schema(**options)


def require(ok: bool, option: str, value: object, expected: str) -> None:
    """Raises ConfigError naming the option unless `ok`."""
    if not ok:
        raise ConfigError(f"data.prepare.options.{option} must be {expected}, is {value!r}")
