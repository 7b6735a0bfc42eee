"""Comparison of the same step in two runs, based on their dumps and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged, read_parquet
from hybridflow.errors import DataError
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import TOKEN_COLUMNS, dump_path
from hybridflow.observe.text_table import aligned

_COLUMNS = ("score", *TOKEN_COLUMNS)
# metrics that depend on time, machine or engines, not on the step's computation
_OTHER_METRICS = (
    "wall_time",
    "step",
    "phase",
    "timing_",
    "perf/",
    "engine/",
    "sync/",
    "controller/",
    "trainer/",
    "rollout/restarts",
    "rollout/staleness",
    "rollout/groups_left",
    "rollout/steps_ahead",
    "sampling/",
)


@dataclass(frozen=True)
class Difference:
    """The difference between two runs in one column or metric.

    Attributes:
        values, differing: number of values, and number of values that differ.
        largest: largest absolute difference; NaN if only one of two values is NaN.
        first_row: the first differing row; None if no row differs, and for metrics.
        shown: the two values of a metric, or of the first difference in a column.
    """

    name: str
    values: int
    differing: int
    largest: float
    first_row: int | None
    shown: str


def compare_step(first: Path, second: Path, step: int) -> list[Difference]:
    """Compare a step's dump columns, then its metrics, between two run folders.

    Raises:
        DataError: a dump or the step's metrics are missing or unreadable, or the dumps contain
            different tokens.
    """
    one = read_parquet(dump_path(first / "rollouts", step))
    two = read_parquet(dump_path(second / "rollouts", step))
    for name in ("prompt_ids", "response_ids"):
        if name not in one or name not in two or _lengths(one, name) != _lengths(two, name):
            raise DataError(
                f"step {step}: cannot compare the dumps of {first} and {second}, because their "
                f"{name} differ"
            )
    found = [_column(name, one, two) for name in _COLUMNS if name in one and name in two]
    return found + list(_metrics(_record(first, step), _record(second, step)))


def describe(differences: list[Difference]) -> str:
    """Format the differences as a table with one line per column and per differing metric, followed
    by the number of equal metrics."""
    rows = [("column", "values", "differing", "largest difference", "first row that differs")]
    metrics = 0
    unlike = []
    for one in differences:
        if one.name in _COLUMNS:
            rows.append(_cells(one))
        else:
            metrics += 1
            if one.differing:
                unlike.append(f"  {one.name}  {one.shown}")
    summary = f"{metrics - len(unlike)} of {metrics} metrics are identical"
    if unlike:
        summary += "; different:"
    return "\n".join([*aligned(rows), summary, *unlike])


def _cells(column: Difference) -> tuple[str, str, str, str, str]:
    first = "-" if column.first_row is None else f"row {column.first_row}: {column.shown}"
    values = f"{column.values:,}"
    differing = f"{column.differing:,}"
    return column.name, values, differing, f"{column.largest:.3g}", first


def _lengths(batch: DataProto, name: str) -> list[int]:
    return list(map(int, batch.lengths(name)))


def _column(name: str, one: DataProto, two: DataProto) -> Difference:
    first = one[name]
    second = two[name]
    if isinstance(first, Jagged) and isinstance(second, Jagged):
        if not np.array_equal(first.offsets, second.offsets):
            raise DataError(f"{name}: row lengths differ between the two dumps")
        lengths = np.diff(first.offsets)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        a = first.values
        b = second.values
    else:
        a = np.asarray(first)
        b = np.asarray(second)
        rows = np.arange(len(a))
    both_nan = np.isnan(a) & np.isnan(b)
    unlike = ~((a == b) | both_nan)
    if not unlike.any():
        return Difference(name, len(a), 0, 0.0, None, "")
    distance = np.abs(a.astype(np.float64) - b.astype(np.float64))[unlike]
    at = int(np.flatnonzero(unlike)[0])
    return Difference(
        name=name,
        values=len(a),
        differing=len(distance),
        largest=float(distance.max()),
        first_row=int(rows[at]),
        shown=f"{a[at]:.7g} -> {b[at]:.7g}",
    )


def _record(folder: Path, step: int) -> Mapping[str, Any]:
    last: Mapping[str, Any] | None = None
    for line in read_jsonl(folder / "metrics.jsonl"):
        if line.get("phase") == "train" and line.get("step") == step:
            last = line
    if last is None:
        raise DataError(f"training step {step} not found in {folder / 'metrics.jsonl'}")
    return last


def _metrics(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[Difference]:
    for name in one:
        if name in two and not name.startswith(_OTHER_METRICS):
            a = math.nan if one[name] is None else float(one[name])
            b = math.nan if two[name] is None else float(two[name])
            shown = f"{a:.7g} -> {b:.7g}"
            if a == b or (math.isnan(a) and math.isnan(b)):
                yield Difference(name, 1, 0, 0.0, None, shown)
            else:
                yield Difference(name, 1, 1, abs(a - b), None, shown)
