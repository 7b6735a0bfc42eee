"""The records of metrics.jsonl and timeline.jsonl, read with size limits. The files may come from
another user, so values that no run would write are skipped."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hybridflow.observe.trackers.base import PHASES

MOST_NAMES = 2_000
MOST_STEP = 1 << 53
_MOST_VALUES = 4_000_000
_MOST_NUMBER = 1e300


class MetricRecords:
    """The records of metrics.jsonl, added one by one. Non-finite numbers become None, and metric
    names are interned."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._names: dict[str, None] = {}
        self._values = 0
        self._strange = 0

    def add(self, record: dict[str, Any]) -> bool:
        """Add a record. Returns False once the limit is exceeded; the caller should then stop
        reading."""
        if not is_step(record.get("step")) or record.get("phase") not in PHASES:
            self._strange += 1
            return True
        self._values += len(record)
        if self._values > _MOST_VALUES:
            return False
        names = self._names
        if len(names) < MOST_NAMES:
            names |= dict.fromkeys(map(sys.intern, record))
        known = {name: value for name, value in record.items() if name in names}
        self.records.append(of_numbers(known))
        return True

    def remarks(self) -> list[str]:
        """Return a sentence about each kind of skipped data."""
        found = []
        if self._values > _MOST_VALUES:
            found.append(
                f"metrics.jsonl: more than {_MOST_VALUES:,} values; later steps are skipped"
            )
        if self._strange:
            found.append(
                f"metrics.jsonl: skipped {self._strange} records without a step or a phase"
            )
        if len(self._names) >= MOST_NAMES:
            found.append(f"metrics.jsonl: more than {MOST_NAMES:,} metrics; the others are skipped")
        return found


def of_numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record's numbers and strings. Numbers that cannot be charted become None."""
    kept: dict[str, Any] = {}
    for name, value in record.items():
        if value is None or isinstance(value, str) or is_number(value):
            kept[sys.intern(name)] = (
                value if isinstance(value, str) or name == "step" else _chartable(value)
            )
    return kept


def is_span(record: Mapping[str, Any]) -> bool:
    """Return True if a timeline record describes a finished phase."""
    for name in ("seconds", "start", "end"):
        time = record.get(name, 0.0)
        if not (isinstance(time, int | float) and 0 <= time < MOST_STEP):
            return False
    step = record.get("step")
    return isinstance(record.get("name"), str) and (step is None or is_step(step))


def is_step(value: object) -> bool:
    """Return True if a value is a plausible step number."""
    return type(value) is int and 0 <= value < MOST_STEP


def is_number(value: object) -> bool:
    """Return True for an int or a float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _chartable(value: Any) -> float | None:
    if value is None or not abs(value) < _MOST_NUMBER:  # also false for NaN
        return None
    return float(value) if abs(value) > 1 / _MOST_NUMBER else 0.0
