"""The values in `run.state`, as stored in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybridflow.errors import FlowError


def kept_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state, exactly as a resumed run would load it.

    Raises:
        FlowError: a value cannot be saved, or would be restored as a different value; the message
            names its key.
    """
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise FlowError(
                f"run.state cannot be saved: the key {key!r} is not a string; use {str(key)!r}"
            )
        what = f"run.state cannot be saved: run.state[{key!r}] is {_shown(value)}"
        try:
            kept[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise FlowError(
                f"{what}: {error}; store only JSON values; for an array, use for example "
                "`float(value)` "
                "or `value.tolist()`"
            ) from error
        if not _is_same(kept[key], value):
            raise FlowError(
                f"{what}, which would be restored as {_shown(kept[key])}; use lists instead of "
                "tuples, and strings as keys"
            )
    return kept


def _is_same(kept: Any, value: Any) -> bool:
    """Return True if values and their types are equal at every level: 1, 1.0 and True all
    differ."""
    if isinstance(value, float):  # including numpy's float64, a subclass
        return bool(kept == value)
    if type(kept) is not type(value):
        return False
    if isinstance(value, dict):
        return list(kept) == list(value) and all(_is_same(kept[key], value[key]) for key in kept)
    if isinstance(value, list):
        return len(kept) == len(value) and all(map(_is_same, kept, value))
    return bool(kept == value)


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"
