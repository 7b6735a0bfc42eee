"""The boundary for what a reward returns: a score that is finite in float32 and plain values beside
it, or a refusal.

Nothing behind this boundary checks again: scores, parts of `gdpo` and rewards of turns are finite
in float32.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# of float32's 3.4e38: differences, sums and products with the size of a group stay finite
_MOST = 1e30
# beside the score: lists of numbers, one for each turn or token
PART_REWARDS = ("turn_rewards", "token_rewards")


def finite_number(value: Any, factor: float = 1.0) -> float | None:
    """A number (also a boolean, a scalar, 0-d array or 0-d tensor) as a float, if it and its
    product with `factor` are at most 1e30 in size, which float32 holds with room for sums; None of
    anything else."""
    # of numpy and torch; detached and on the host
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
    """A returned score, or mapping with one under "score", as the score and the values beside it.

    Args:
        weight: what the score is multiplied with later (`reward.weight`).

    Raises:
        ValueError: there is no finite score of at most 1e30, or rewards of turns or tokens are no
            list of such numbers.
    """
    extra: dict[str, Any] = {}
    score = found
    if isinstance(found, Mapping):
        extra = {str(key): value for key, value in found.items() if key != "score"}
        score = found.get("score")
    number = finite_number(score, weight)
    if number is None:
        raise ValueError(
            f"{shown(found)}; expected a finite number (at most 1e30, also times reward.weight) or "
            "a dict with one "
            'under "score"'
        )
    for name in PART_REWARDS:
        if name in extra:
            extra[name] = _part_rewards(name, extra[name], weight)
    return number, extra


def _part_rewards(name: str, values: Any, weight: float) -> list[float]:
    given = values.tolist() if hasattr(values, "tolist") else values
    found = (
        [finite_number(value, weight) for value in given]
        if isinstance(given, (list, tuple))
        else [None]
    )
    if any(value is None for value in found):
        raise ValueError(f"{name}={shown(values)}, which must be a list of finite numbers")
    return [value for value in found if value is not None]


def shown(value: Any) -> str:
    """The begin of a value's text, whatever its own methods do."""
    try:
        return repr(str(value)[:120])
    except Exception as error:
        return f"a {type(value).__name__} without a text ({type(error).__name__})"
