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
    """Return the number of tokens that each layer attends to, including the current one; 0 means
    all.

    Args:
        window: `sliding_window` from config.json; None if there are no windows.
        kinds: `layer_types` from config.json.
        default: function that returns True if a layer has a window; used if config.json has no
            `layer_types`.

    Raises:
        ModelError: the length of `layer_types` differs from the number of layers, it contains an
            unknown kind, or a layer has a window but `window` is not set.
    """
    if kinds is None:
        kinds = [SLIDING if window and default(layer) else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {SLIDING, FULL}:
        raise ModelError(
            f"layer_types={list(kinds)} is not supported: it must have one entry, {SLIDING} or "
            f"{FULL}, per layer (num_hidden_layers={num_layers})"
        )
    if SLIDING in kinds and not window:
        raise ModelError(
            f"layer_types has {SLIDING}, but sliding_window is not set or is disabled "
            "(use_sliding_window); set it to a number of tokens"
        )
    return tuple(int(window or 0) if kind == SLIDING else 0 for kind in kinds)


def megatron_windows(windows: Sequence[int]) -> dict[str, Any]:
    """Return the keyword arguments for Megatron's TransformerConfig that set these windows.

    Megatron specifies a window as the numbers of tokens to the left and to the right of the query.
    """
    if not any(windows):
        return {}
    return {
        "window_size": (max(windows) - 1, 0),
        "window_attn_skip_freq": [int(window > 0) for window in windows],
    }
