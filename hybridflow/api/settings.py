"""Conversion of settings from Python values to command-line words, so that they are loaded and
checked like a command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.keys import require_key
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError

# text that the loader reads back unchanged without quotes
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_BEFORE_QUOTE = re.compile(r'(\\*)("|\Z)')
_OTHER_VALUES = {"null", "true", "false", "inf", "nan"}


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return one word `key=value` per setting. `{"trainer": {"total_steps": 5}}` and
    `{"trainer.total_steps": 5}` are equivalent."""
    found = []
    for key, value in _flat(settings):
        try:
            found.append(f"{key}={text(value, key)}")
        except ConfigError:
            require_key(RunConfig, key)  # report a wrong key first
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
    """Return True if the key is a section of the schema."""
    found: Any = RunConfig()
    for name in key.split("."):
        found = getattr(found, name, None)
    return is_dataclass(found)


def text(value: Any, key: str) -> str:
    """Format a value the way it is written on the command line.

    Raises:
        ConfigError: the value is not plain data.
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
        f"{key} must be a number, a string, a bool, None, or a list or dictionary of these; got "
        f"{type(value).__name__}"
    )


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _OTHER_VALUES:
        return value
    # a quote ends the text, and backslashes before a quote are read as escapes
    return '"' + _BEFORE_QUOTE.sub(_escaped, value) + '"'


def _escaped(found: re.Match[str]) -> str:
    return found[1] * 2 + found[2].replace('"', '\\"')


def _key(name: Any, key: str) -> str:
    if isinstance(name, str) and re.fullmatch(r"[\w./-]+", name, re.ASCII):
        return name
    raise ConfigError(
        f"{key}: dictionary key {name!r} contains characters not allowed in settings; set it in "
        "the recipe"
    )
