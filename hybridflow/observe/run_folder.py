"""Reader of run folders for the report. Missing or damaged files, for example after a run was
killed, are skipped and listed.

The folder may come from another user, so no file outside the folder is read, sizes are limited, and
values that no run would write are skipped.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import iter_parquet, parquet_rows, pick_parquet
from hybridflow.config.outside_json import read_outside_json
from hybridflow.config.outside_text import is_inside, read_outside_bytes
from hybridflow.config.outside_yaml import MOST_BYTES, read_outside_yaml
from hybridflow.errors import DataError
from hybridflow.observe.jsonl import number_ranges, read_jsonl, removed_lines
from hybridflow.observe.rollouts import list_dumps
from hybridflow.observe.timeline import WHOLE_STEP
from hybridflow.observe.tokens import Decode, open_decoder, read_stretches
from hybridflow.observe.trackers.base import PHASES

CHANGES = "changes.jsonl"  # settings changed at each resume from a checkpoint
_ROWS_PER_DUMP = 4  # the two best and the two worst
# a step has about 150 metrics in 7 KB
_MOST_RECORD_BYTES = 128 << 20
_MOST_RECORDS = 250_000
_MOST_VALUES = 4_000_000
_MOST_NAMES = 2_000
_MOST_JSON_BYTES = 8 << 20
_MOST_FOLDERS = 32
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
)
_SHOWN = (*_NUMBERS, *_TEXTS)
_OUTSIDE = "not followed, because it links to a file outside the run folder"
_MOST_STEP = 1 << 53
_MOST_NUMBER = 1e300


@dataclass(frozen=True)
class Sample:
    """Rows selected from one dump, in order of descending score."""

    kind: str
    step: int
    count: int
    mean_score: float | None
    rows: list[dict[str, Any]]


@dataclass
class RunFolder:
    """The contents of a run folder. `missing` contains a sentence about each missing part."""

    path: Path
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)

    def points(self, phase: str, name: str) -> list[tuple[float, float | None]]:
        """Return (step, value) of a metric, ordered by step. If a step has several records, the
        last one is used."""
        found = {}
        for record in self.metrics:
            if (
                record["phase"] == phase
                and name in record
                and (record[name] is None or _is_number(record[name]))
            ):
                found[record["step"]] = record[name]
        return sorted(found.items())

    def val_sets(self) -> list[str]:
        """Return the metric prefix of each validation set, "val" or "val-NAME", in the order of the
        configuration."""
        found: dict[str, None] = {}
        for record in self.metrics:
            if record["phase"] == "val":
                for name in record:
                    if match := re.fullmatch(r"(val(?:-[^/]+)?)/score", name):
                        found[match[1]] = None
        return list(found)

    def names(self, phase: str) -> set[str]:
        """Return the names of all metrics recorded in a phase."""
        names: set[str] = set()
        for record in self.metrics:
            if record.get("phase") == phase:
                names.update(record)
        return names

    def values(self, phase: str, name: str) -> list[float]:
        """Return the values of a metric in step order, without gaps."""
        return [value for _, value in self.points(phase, name) if value is not None]

    def setting(self, dotted: str) -> Any:
        """Return the value of a dotted key in config.yaml; None if it is missing or is an
        implausible number."""
        node: Any = self.config
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, bool | str):
            return node
        return node if _is_number(node) and abs(node) < _MOST_STEP else None

    def size(self, dotted: str) -> int:
        """Return the value of a setting that is a count, or 1 if it is missing."""
        found = self.setting(dotted)
        return found if _is_step(found) and found else 1


def load_run(path: Path) -> RunFolder:
    """Read a run folder."""
    run = RunFolder(path)
    run.config_text, run.config = _config(path / "config.yaml", run.missing)
    run.summary = _json(
        path / "summary.json", "the run was killed, or is still running", run.missing
    )
    run.environment = _json(path / "environment.json", "", run.missing)
    run.metrics = list(_metrics(_records(path / "metrics.jsonl", run.missing), run.missing))
    for record in _records(path / "timeline.jsonl", run.missing):
        if _is_span(record):
            run.timeline.append(_of_numbers(record))
    for record in _records(path / CHANGES, run.missing):
        if _is_step(record.get("step")) and isinstance(record.get("changes"), list):
            run.changes.append(record)
    for name, found, so in (
        ("metrics.jsonl", run.metrics, ", so no charts"),
        ("timeline.jsonl", run.timeline, ""),
    ):
        if not found:
            run.missing.append(
                f"{name}: {'has no records' if (path / name).exists() else 'not found'}{so}"
            )
    run.missing += _lost_steps(run)
    decode = (
        open_decoder(path / "model") if is_inside(path / "model" / "tokenizer.json", path) else None
    )
    validations = sorted(folder.name for folder in path.glob("validation-*"))
    for kind in ("rollouts", "validation", *validations[:_MOST_FOLDERS]):
        run.samples += _samples(path / kind, kind, decode, run.missing)
    return run


def _records(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a file up to a limit, and add an entry to `missing` if more are left."""
    if path.exists() and not is_inside(path, path.parent):
        missing.append(f"{path.name}: {_OUTSIDE}")
        return
    skipped: list[int] = []
    try:
        for number, record in enumerate(read_jsonl(path, skipped, _MOST_RECORD_BYTES)):
            if number == _MOST_RECORDS:
                missing.append(
                    f"{path.name}: has more than {_MOST_RECORDS:,} records; later ones are skipped"
                )
                break
            yield record
    except (DataError, OSError) as error:
        missing.append(f"{path.name}: not readable ({str(error).rsplit(': ', 1)[-1]})")
        return
    if skipped:
        missing.append(f"{path.name}: {removed_lines(skipped)}")
    if path.exists() and (size := path.stat().st_size) > _MOST_RECORD_BYTES:
        missing.append(
            f"{path.name}: only the first {_MOST_RECORD_BYTES >> 20} MiB of {size >> 20} MiB are "
            "shown"
        )


def _metrics(records: Iterable[dict[str, Any]], missing: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the per-step records, with non-finite numbers replaced. Metric names are interned."""
    values = 0
    strange = 0
    names: dict[str, None] = {}
    for record in records:
        if not _is_step(record.get("step")) or record.get("phase") not in PHASES:
            strange += 1
            continue
        values += len(record)
        if values > _MOST_VALUES:
            missing.append(
                f"metrics.jsonl: has more than {_MOST_VALUES:,} values; later steps are skipped"
            )
            break
        if len(names) < _MOST_NAMES:
            names |= dict.fromkeys(map(sys.intern, record))
        yield _of_numbers({name: value for name, value in record.items() if name in names})
    if strange:
        missing.append(f"metrics.jsonl: {strange} records have no step or phase and are skipped")
    if len(names) >= _MOST_NAMES:
        missing.append(
            f"metrics.jsonl: has more than {_MOST_NAMES:,} metrics; the others are skipped"
        )


def _of_numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record restricted to numbers and text, with None in place of numbers that no chart
    can show."""
    kept: dict[str, Any] = {}
    for name, value in record.items():
        if value is None or isinstance(value, str) or _is_number(value):
            kept[sys.intern(name)] = (
                value if isinstance(value, str) or name == "step" else _chartable(value)
            )
    return kept


def _chartable(value: Any) -> float | None:
    if value is None or not abs(value) < _MOST_NUMBER:  # also false for NaN
        return None
    return float(value) if abs(value) > 1 / _MOST_NUMBER else 0.0


def _is_span(record: Mapping[str, Any]) -> bool:
    """Return True if a timeline record describes a finished phase."""
    for name in ("seconds", "start", "end"):
        time = record.get(name, 0.0)
        if not (isinstance(time, int | float) and 0 <= time < _MOST_STEP):
            return False
    step = record.get("step")
    return isinstance(record.get("name"), str) and (step is None or _is_step(step))


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_STEP


def _lost_steps(run: RunFolder) -> Iterator[str]:
    """Yield a sentence for each kind of record in which some steps are missing. A run that trains
    on another run's dumps may begin at any step.
    """
    first = None if run.setting("trainer.rollouts_from") else 1
    for phase in ("train", "sft", "reward"):
        yield from _gaps(
            "metrics.jsonl",
            phase,
            (one["step"] for one in run.metrics if one["phase"] == phase),
            first,
        )
    whole = (
        one["step"]
        for one in run.timeline
        if one["name"] == WHOLE_STEP and one.get("step") is not None
    )
    yield from _gaps("timeline.jsonl", "train", whole, first)


def _gaps(name: str, phase: str, steps: Iterable[int], first: int | None) -> Iterator[str]:
    there = sorted({step for step in steps if step > 0})
    if not there:
        return
    lost: list[int] = []
    for before, after in pairwise([(first or there[0]) - 1, *there]):
        lost.extend(range(before + 1, min(after, before + 1 + _MOST_NAMES)))
    if lost:
        yield f"{name}: records of {phase} step {number_ranges(lost)} are missing"


def pick_rows(rows: list[dict[str, Any]], count: int = _ROWS_PER_DUMP) -> list[dict[str, Any]]:
    """Return the rows with the best and the worst scores, half each, in descending order. Among
    ties, rows from different prompts are preferred."""
    ranked = sorted(rows, key=_score, reverse=True)
    if len(ranked) <= count:
        return ranked
    good = _varied(ranked, count - count // 2)
    chosen = set(map(id, good))
    bad = _varied([row for row in reversed(ranked) if id(row) not in chosen], count // 2)
    return good + bad[::-1]


def _varied(ranked: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows. Among rows with the top score, every prompt appears once
    before any prompt appears twice."""
    seen: set[Any] = set()
    first = []
    later = []
    for row in ranked:
        if _score(row) == _score(ranked[0]) and row.get("uid") not in seen:
            seen.add(row.get("uid"))
            first.append(row)
        else:
            later.append(row)
    return (first + later)[:count]


def _samples(folder: Path, kind: str, decode: Decode | None, missing: list[str]) -> list[Sample]:
    """Read the first, middle and last rollout dump, and the first and last dump of validation
    answers."""
    dumps = list_dumps(folder)
    if not dumps:
        missing.append(f"{kind}/: no dumps")
        return []
    wanted = sorted(
        {0, len(dumps) // 2, len(dumps) - 1} if kind == "rollouts" else {0, len(dumps) - 1}
    )
    found = []
    for index in wanted:
        step, path = dumps[index]
        try:
            if not is_inside(path, folder.parent):
                raise DataError(_OUTSIDE)
            found.append(_sample(path, kind, step, decode))
        except DataError as error:
            missing.append(f"{kind}/{path.name}: not readable ({str(error).rsplit(': ', 1)[-1]})")
    return found


def _sample(path: Path, kind: str, step: int, decode: Decode | None) -> Sample:
    """Read the selected rows of a dump, and only the scores of all other rows. Raises DataError if
    the dump cannot be read."""
    if (count := parquet_rows(path)) > _MOST_ROWS:
        raise DataError(f"more than {_MOST_ROWS:,} rows")
    rows: list[dict[str, Any]] = [{"row": number} for number in range(count)]
    at = 0
    for batch in iter_parquet(path, (), _RANKED_BY, most_bytes=_MOST_GROUP_BYTES):
        for name in batch.columns:
            for row, value in zip(
                rows[at : at + len(batch)], batch.dense(name).tolist(), strict=True
            ):
                row[name] = value
        at += len(batch)
    scores = [row["score"] for row in rows if _is_number(row.get("score"))]
    mean = sum(scores) / len(scores) if scores else None
    numbers = [row["row"] for row in pick_rows(rows)]
    if not numbers:
        return Sample(kind, step, 0, mean, [])
    picked = pick_parquet(path, numbers, _SHOWN, _MOST_GROUP_BYTES)
    tokens = read_stretches(path, numbers, decode, _MOST_GROUP_BYTES)
    shown: list[dict[str, Any]] = [{"tokens": one} for one in tokens]
    for name in picked.columns:
        column = picked[name]
        if isinstance(column, np.ndarray):
            for row, value in zip(shown, column.tolist(), strict=True):
                row[name] = value
    return Sample(
        kind,
        step,
        len(rows),
        mean,
        [_shown_fields(row) | {"tokens": row["tokens"]} for row in shown],
    )


def _score(row: Mapping[str, Any]) -> float:
    score = row.get("score")
    return float(score) if isinstance(score, int | float) and not math.isnan(score) else -math.inf


def _shown_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that the page shows, with None for missing or invalid numbers."""
    numbers = {}
    for name in _NUMBERS:
        numbers[name] = row[name] if _is_number(row.get(name)) else None
    return numbers | {name: row.get(name) for name in _TEXTS}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _config(path: Path, missing: list[str]) -> tuple[str, dict[str, Any]]:
    """Return config.yaml as text and as a mapping. The mapping is empty if the file is not a valid
    run configuration."""
    try:
        _require_inside(path)
        return read_outside_yaml(path)
    except FileNotFoundError:
        missing.append(f"{path.name}: not found")
        return "", {}
    except (OSError, ValueError) as error:
        missing.append(f"{path.name}: not readable ({error}), so settings are unknown")
    with suppress(OSError, ValueError):
        _require_inside(path)
        return read_outside_bytes(path, MOST_BYTES).decode("utf-8"), {}
    return "", {}


def _json(path: Path, meaning: str, missing: list[str]) -> dict[str, Any]:
    try:
        _require_inside(path)
        return read_outside_json(path, _MOST_JSON_BYTES)
    except FileNotFoundError:
        missing.append(f"{path.name}: not found" + (f" ({meaning})" if meaning else ""))
    except (OSError, ValueError) as error:
        wrong = "not valid JSON" if str(error).startswith("not JSON") else f"not readable ({error})"
        missing.append(f"{path.name}: {wrong}")
    return {}


def _require_inside(path: Path) -> None:
    """Raise ValueError if a file in the run folder is a link to a file outside the folder."""
    if not is_inside(path, path.parent):
        raise ValueError(_OUTSIDE)
