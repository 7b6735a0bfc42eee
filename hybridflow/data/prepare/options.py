"""Validation of task options. Ranges are annotated in the same way as for configuration keys."""

from __future__ import annotations

from typing import Any

from hybridflow.config.keys import out_of_range
from hybridflow.errors import ConfigError

KEY = "data.prepare.options"


def check_ranges(options: Any) -> None:
    """Raise a ConfigError that names the first option outside its annotated range."""
    for problem in out_of_range(options):
        raise ConfigError(f"{KEY}.{problem}")


def require(ok: bool, option: str, value: object, expected: str) -> None:
    """Raise a ConfigError that names the option unless `ok` is true."""
    if not ok:
        raise ConfigError(f"{KEY}.{option} must be {expected}, got {value!r}")
