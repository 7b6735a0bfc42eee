"""A task's options are read and checked like the keys of a configuration; what a range cannot say
is checked here."""

from __future__ import annotations

from typing import Any

from hybridflow.config.keys import out_of_range
from hybridflow.errors import ConfigError

KEY = "data.prepare.options"


def check_ranges(options: Any) -> None:
    """Raises ConfigError naming a number that lies outside of the range of its annotation."""
    for problem in out_of_range(options):
        raise ConfigError(f"{KEY}.{problem}")


def require(ok: bool, option: str, value: object, expected: str) -> None:
    """Raises ConfigError naming the option unless `ok`."""
    if not ok:
        raise ConfigError(f"{KEY}.{option} must be {expected}, is {value!r}")
