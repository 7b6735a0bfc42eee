"""Validation of the return values of reward functions: a score that is finite in float32, and plain
extra values.

All downstream code assumes that scores, `gdpo` parts and turn rewards are finite in float32.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# of float32's 3.4e38; leaves room for differences, sums and products with the group size
_MOST = 1e30
# extra values that are lists of numbers, one per turn or per token
PART_REWARDS = ("turn_rewards", "token_rewards")


def finite_number(value: Any, factor: float = 1.0) -> float | None:
    """Convert a number, boolean, scalar, 0-d array or 0-d tensor to float. Returns None for
    anything else, or if the absolute value of the number or its product with `factor` exceeds
    1e30."""
    # numpy and torch: `item` detaches and moves to the host
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return (
        number
        if math.isfinite(number) and max(abs(number), abs(number * factor)) <= _MOST
        else None
    )


def checked_score(found: Any, weight: float = 1.0) -> tuple[float, dict[str, Any]]:
    """Split a returned value, a score or a mapping with the key "score", into the score and the
    extra values.

    Args:
        weight: factor by which the score will be multiplied (`reward.weight`).

    Raises:
        ValueError: the score is missing, not finite or above 1e30 in magnitude, or the turn or
            token rewards are not lists of valid numbers.
    """
    extra: dict[str, Any] = {}
    score = found
    if isinstance(found, Mapping):
        extra = {str(key): value for key, value in found.items() if key != "score"}
        score = found.get("score")
    number = finite_number(score, weight)
    if number is None:
        raise ValueError(
            f"{shown(found)}; expected a finite number (at most 1e30, also after multiplication by "
            'reward.weight) or a dict with a "score"'
        )
    for name in PART_REWARDS:
        if name in extra:
            extra[name] = _part_rewards(name, extra[name], weight)
    return number, extra


def _part_rewards(name: str, values: Any, weight: float) -> list[float]:
    given = values.tolist() if hasattr(values, "tolist") else values
    found = []
    for value in given if isinstance(given, (list, tuple)) else [None]:
        number = None if value is None else finite_number(value, weight)
        if number is None:
            raise ValueError(f"{name}={shown(values)}; expected a list of finite numbers")
        found.append(number)
    return found


def shown(value: Any) -> str:
    """Return the beginning of a value's string form. Works even if the value's own methods
    raise."""
    try:
        return repr(str(value)[:120])
    except Exception as error:
        return f"a {type(value).__name__} that cannot be printed ({type(error).__name__})"
