"""Settings given as Python values, as words of the command line: one loader reads and checks
both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.keys import require_key
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError

# read back as the same text without quotes
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_BEFORE_QUOTE = re.compile(r'(\\*)("|\Z)')
_OTHER_VALUES = {"null", "true", "false", "inf", "nan"}


def words(settings: Mapping[str, Any]) -> list[str]:
    """`key=value` for each setting: `{"trainer": {"total_steps": 5}}` and
    `{"trainer.total_steps": 5}` are the same."""
    found = []
    for key, value in _flat(settings):
        try:
            found.append(f"{key}={text(value, key)}")
        except ConfigError:
            require_key(RunConfig, key)  # a key that is wrong is said first
            raise
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and _is_section(key):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _is_section(key: str) -> bool:
    """Whether keys of the schema begin with this one."""
    found: Any = RunConfig()
    for name in key.split("."):
        found = getattr(found, name, None)
    return is_dataclass(found)


def text(value: Any, key: str) -> str:
    """A value as the command line has it.

    Raises:
        ConfigError: it is no plain data.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _quoted(str(value))
    if isinstance(value, Mapping):
        pairs = [f"{_key(name, key)}: {text(one, key)}" for name, one in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence | set | frozenset):
        return "[" + ", ".join(text(one, key) for one in value) + "]"
    raise ConfigError(
        f"{key}: a value of type {type(value).__name__}; give a number, a text, true or false, "
        "None, a list or a dictionary of these"
    )


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _OTHER_VALUES:
        return value
    # a quote ends the text, and backslashes in front of one are read as escapes
    return '"' + _BEFORE_QUOTE.sub(_escaped, value) + '"'


def _escaped(found: re.Match[str]) -> str:
    return found[1] * 2 + found[2].replace('"', '\\"')


def _key(name: Any, key: str) -> str:
    if isinstance(name, str) and re.fullmatch(r"[\w./-]+", name, re.ASCII):
        return name
    raise ConfigError(
        f"{key}: the name {name!r} in a dictionary has characters that settings cannot have; "
        "write it into the recipe"
    )
