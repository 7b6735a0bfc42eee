"""The values that a flow keeps in `run.state`, as a checkpoint holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybridflow.errors import FlowError


def kept_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state, as a resumed run would have it.

    Raises:
        FlowError: a value would come back as another one, or not at all; names its key.
    """
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise FlowError(
                f"run.state cannot be saved: the key {key!r} is no text; write {str(key)!r}"
            )
        what = f"run.state cannot be saved: run.state[{key!r}] is {_shown(value)}"
        try:
            kept[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise FlowError(
                f"{what}: {error}; keep JSON values in it, of an array for example "
                "`float(value)` or `value.tolist()`"
            ) from error
        if not _is_same(kept[key], value):
            raise FlowError(
                f"{what}, which would come back as {_shown(kept[key])}; keep lists in place of "
                "tuples, and text as keys, in it"
            )
    return kept


def _is_same(kept: Any, value: Any) -> bool:
    """Whether values and their types are equal at every level: 1, 1.0 and True are three."""
    if isinstance(value, float):  # of numpy too, which is one
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
