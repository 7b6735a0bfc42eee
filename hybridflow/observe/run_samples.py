"""The rows of a run's dumps that its pages show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import iter_parquet, parquet_rows, pick_parquet
from hybridflow.config.outside_text import is_inside
from hybridflow.errors import DataError
from hybridflow.observe.metric_records import is_number
from hybridflow.observe.rollouts import list_dumps
from hybridflow.observe.tokens import Decode, read_stretches

_ROWS_PER_DUMP = 4  # the two best and the two worst
_MOST_ROWS = 500_000
_MOST_GROUP_BYTES = 256 << 20
_RANKED_BY = ("uid", "score")
_NUMBERS = ("score", "response_length", "logprob_diff_mean", "advantage", "turns", "tool_calls")
_TEXTS = (
    "prompt_text",
    "response_text",
    "ground_truth",
    "finish_reason",
    "reward_extra",
    "agent_failure",
    "reward_failure",
    "messages",
)
_SHOWN = (*_NUMBERS, *_TEXTS)
OUTSIDE = "not followed, because it links to a file outside the run folder"


@dataclass(frozen=True)
class Sample:
    """Rows selected from one dump, in order of descending score."""

    kind: str
    step: int
    count: int
    mean_score: float | None
    rows: list[dict[str, Any]]


def samples_of(folder: Path, kind: str, decode: Decode | None, missing: list[str]) -> list[Sample]:
    """Read the first, middle and last rollout dump, and the first and last dump of validation
    answers."""
    dumps = list_dumps(folder)
    if not dumps:
        missing.append(f"{kind}/: no dumps")
        return []
    wanted = {0, len(dumps) - 1}
    if kind == "rollouts":
        wanted.add(len(dumps) // 2)
    found = []
    for index in sorted(wanted):
        step, path = dumps[index]
        try:
            if not is_inside(path, folder.parent):
                raise DataError(OUTSIDE)
            found.append(_sample(path, kind, step, decode))
        except DataError as error:
            missing.append(f"{kind}/{path.name}: {not_readable(error)}")
    return found


def _sample(path: Path, kind: str, step: int, decode: Decode | None) -> Sample:
    """Read the selected rows of a dump, and only the scores of all other rows. Raises DataError if
    the dump cannot be read."""
    count = parquet_rows(path)
    if count > _MOST_ROWS:
        raise DataError(f"more than {_MOST_ROWS:,} rows")
    rows: list[dict[str, Any]] = [{"row": number} for number in range(count)]
    at = 0
    for batch in iter_parquet(path, (), _RANKED_BY, most_bytes=_MOST_GROUP_BYTES):
        read = rows[at : at + len(batch)]
        for name in batch.columns:
            _fill(read, name, batch.dense(name).tolist())
        at += len(batch)
    if not rows:
        return Sample(kind, step, 0, None, [])
    scores = [row["score"] for row in rows if is_number(row.get("score"))]
    mean = sum(scores) / len(scores) if scores else None
    numbers = [row["row"] for row in pick_rows(rows)]
    return Sample(kind, step, count, mean, read_rows(path, numbers, decode))


def pick_rows(rows: list[dict[str, Any]], count: int = _ROWS_PER_DUMP) -> list[dict[str, Any]]:
    """Return the rows with the best and the worst scores, half each, in descending order. Among
    ties, rows from different prompts are preferred."""
    ranked = sorted(rows, key=_score, reverse=True)
    if len(ranked) <= count:
        return ranked
    half = count // 2
    good = _varied(ranked, count - half)
    chosen = set(map(id, good))
    others = [row for row in reversed(ranked) if id(row) not in chosen]
    bad = _varied(others, half)
    return good + bad[::-1]


def _varied(ranked: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows. Among rows with the top score, every prompt appears once
    before any prompt appears twice."""
    seen: set[Any] = set()
    first = []
    later = []
    top = _score(ranked[0])
    for row in ranked:
        uid = row.get("uid")
        if _score(row) == top and uid not in seen:
            seen.add(uid)
            first.append(row)
        else:
            later.append(row)
    return (first + later)[:count]


def read_rows(path: Path, numbers: list[int], decode: Decode | None) -> list[dict[str, Any]]:
    """Return rows of a dump as dictionaries with the displayed columns and the key `tokens`. Raises
    DataError if the dump cannot be read."""
    picked = pick_parquet(path, numbers, _SHOWN, _MOST_GROUP_BYTES)
    tokens = read_stretches(path, numbers, decode, _MOST_GROUP_BYTES)
    found: list[dict[str, Any]] = [{} for _ in numbers]
    for name in picked.columns:
        column = picked[name]
        if isinstance(column, np.ndarray):
            _fill(found, name, column.tolist())
    shown = list(map(_shown_fields, found))
    _fill(shown, "tokens", tokens)
    return shown


def _fill(rows: list[dict[str, Any]], name: str, column: list[Any]) -> None:
    """Add a column to rows."""
    for row, value in zip(rows, column, strict=True):
        row[name] = value


def _score(row: Mapping[str, Any]) -> float:
    score = row.get("score")
    if not isinstance(score, int | float) or math.isnan(score):
        return -math.inf
    return float(score)


def _shown_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that the page shows, with None for missing or invalid numbers."""
    shown = {name: row.get(name) for name in _SHOWN}
    for name in _NUMBERS:
        if not is_number(shown[name]):
            shown[name] = None
    return shown


def not_readable(error: Exception) -> str:
    """Return that a file is not readable, with the last part of the error's message."""
    reason = str(error).rsplit(": ", 1)[-1]
    return f"not readable ({reason})"
