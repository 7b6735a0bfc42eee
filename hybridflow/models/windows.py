"""Sliding windows: the number of tokens that each layer attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridflow.errors import ModelError

SLIDING = "sliding_attention"
FULL = "full_attention"


def layer_windows(
    window: int | None,
    num_layers: int,
    kinds: Sequence[str] | None = None,
    default: Callable[[int], bool] = lambda layer: True,
) -> tuple[int, ...]:
    """Return the number of tokens that each layer attends to, its own included; 0: all.

    Args:
        window: `sliding_window` of config.json; None: there are no windows.
        kinds: `layer_types` of config.json.
        default: returns True if a layer has a window; used if config.json has no `layer_types`.

    Raises:
        ModelError: `layer_types` has another length than the model or an unknown kind, or a layer
            has a window without a size.
    """
    if kinds is None:
        kinds = [SLIDING if window and default(layer) else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {SLIDING, FULL}:
        raise ModelError(
            f"layer_types={list(kinds)} is not supported: it must list {SLIDING} or {FULL} for "
            f"each of the {num_layers} layers (num_hidden_layers)"
        )
    if SLIDING in kinds and not window:
        raise ModelError(
            f"layer_types has {SLIDING}, but sliding_window is not set or not in use "
            "(use_sliding_window); set its size in tokens"
        )
    return tuple(int(window or 0) if kind == SLIDING else 0 for kind in kinds)


def megatron_windows(windows: Sequence[int]) -> dict[str, Any]:
    """Return the keyword arguments of Megatron's TransformerConfig for these windows.

    Megatron counts the tokens to the left of the query, and to its right.
    """
    if not any(windows):
        return {}
    return {
        "window_size": (max(windows) - 1, 0),
        "window_attn_skip_freq": [int(window > 0) for window in windows],
    }
