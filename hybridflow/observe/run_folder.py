"""Reader of run folders for the report. Missing or damaged files, for example after a run was
killed, are skipped and listed.

The folder may come from another user, so no file outside the folder is read, sizes are limited, and
values that no run would write are skipped.
"""

from __future__ import annotations

import math
import re
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
from hybridflow.observe.metric_records import (
    MOST_NAMES,
    MOST_STEP,
    MetricRecords,
    is_number,
    is_span,
    is_step,
    of_numbers,
)
from hybridflow.observe.rollouts import list_dumps
from hybridflow.observe.timeline import WHOLE_STEP
from hybridflow.observe.tokens import Decode, open_decoder, read_stretches

CHANGES = "changes.jsonl"  # settings changed at each resume from a checkpoint
_ROWS_PER_DUMP = 4  # the two best and the two worst
# a step has about 150 metrics in 7 KB
_MOST_RECORD_BYTES = 128 << 20
MOST_RECORDS = 250_000
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
    "reward_failure",
    "messages",
)
_SHOWN = (*_NUMBERS, *_TEXTS)
_OUTSIDE = "not followed, because it links to a file outside the run folder"


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
        """Return a metric's (step, value) pairs, ordered by step. If a step has several records,
        the last one is used."""
        found = {}
        for record in self.metrics:
            if (
                record["phase"] == phase
                and name in record
                and (record[name] is None or is_number(record[name]))
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
        """Return the values of a metric in step order, omitting missing values."""
        return [value for _, value in self.points(phase, name) if value is not None]

    def setting(self, dotted: str) -> Any:
        """Return the value of a dotted key in config.yaml; None if it is missing or is an
        implausible number."""
        node: Any = self.config
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, bool | str):
            return node
        return node if is_number(node) and abs(node) < MOST_STEP else None

    def logprob_diff_bound(self) -> float | None:
        """Return the bound on the mean log-probability difference; None if there is none."""
        bound = self.setting("rollout.logprob_diff_bound")
        if not is_number(bound) or bound <= 0:
            return None
        if self.setting("model.dtype") == "bfloat16":
            of_bfloat16 = self.setting("rollout.logprob_diff_bound_bfloat16")
            bound = max(bound, of_bfloat16) if is_number(of_bfloat16) else bound
        return float(bound)

    def size(self, dotted: str) -> int:
        """Return the value of a setting that is a count, or 1 if it is missing."""
        found = self.setting(dotted)
        return found if is_step(found) and found else 1


def load_run(path: Path) -> RunFolder:
    """Read a run folder."""
    run = read_about(path)
    metrics = MetricRecords()
    for record in _records(path / "metrics.jsonl", run.missing):
        if not metrics.add(record):
            break
    run.metrics = metrics.records
    run.missing += metrics.remarks()
    for record in _records(path / "timeline.jsonl", run.missing):
        if is_span(record):
            run.timeline.append(of_numbers(record))
    run.missing += absent(run)
    decode = decoder_of(path)
    for folder in dump_folders(path):
        if not folder.name.startswith("rollouts-"):
            run.samples += _samples(folder, folder.name, decode, run.missing)
    return run


def read_about(path: Path) -> RunFolder:
    """Read the run's configuration, summary, environment and configuration changes."""
    run = RunFolder(path)
    run.config_text, run.config = _config(path / "config.yaml", run.missing)
    run.summary = _json(
        path / "summary.json", "the run was killed, or is still running", run.missing
    )
    run.environment = _json(path / "environment.json", "", run.missing)
    for record in _records(path / CHANGES, run.missing):
        if is_step(record.get("step")) and isinstance(record.get("changes"), list):
            run.changes.append(record)
    return run


def absent(run: RunFolder) -> list[str]:
    """Return a sentence for each file without records and each gap in the steps."""
    found = []
    for name, records, so in (
        ("metrics.jsonl", run.metrics, ", so there are no charts"),
        ("timeline.jsonl", run.timeline, ""),
    ):
        if not records:
            what = "has no records" if (run.path / name).exists() else "not found"
            found.append(f"{name}: {what}{so}")
    return found + list(_lost_steps(run))


def decoder_of(path: Path) -> Decode | None:
    """Return a decoder that uses the tokenizer in the run folder; None if there is none."""
    inside = is_inside(path / "model" / "tokenizer.json", path)
    return open_decoder(path / "model") if inside else None


def dump_folders(path: Path) -> list[Path]:
    """Return the dump folders: rollouts and validation, even if they do not exist, then those of
    additional policies and validation sets.
    """
    found = [path / "rollouts", path / "validation"]
    for pattern in ("validation-*", "rollouts-*"):
        found += sorted(path.glob(pattern))[:_MOST_FOLDERS]
    return found


def _records(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a file up to a limit, and add an entry to `missing` if there are
    more."""
    if path.exists() and not is_inside(path, path.parent):
        missing.append(f"{path.name}: {_OUTSIDE}")
        return
    skipped: list[int] = []
    try:
        for number, record in enumerate(read_jsonl(path, skipped, _MOST_RECORD_BYTES)):
            if number == MOST_RECORDS:
                missing.append(
                    f"{path.name}: more than {MOST_RECORDS:,} records; later ones are skipped"
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


def _lost_steps(run: RunFolder) -> Iterator[str]:
    """Yield a sentence for each kind of record that is missing for some steps. A run that trains on
    another run's dumps may begin at any step.
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
        lost.extend(range(before + 1, min(after, before + 1 + MOST_NAMES)))
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
    scores = [row["score"] for row in rows if is_number(row.get("score"))]
    mean = sum(scores) / len(scores) if scores else None
    numbers = [row["row"] for row in pick_rows(rows)]
    if not numbers:
        return Sample(kind, step, 0, mean, [])
    return Sample(kind, step, len(rows), mean, read_rows(path, numbers, decode))


def read_rows(path: Path, numbers: list[int], decode: Decode | None) -> list[dict[str, Any]]:
    """Return rows of a dump as dictionaries with the displayed columns and the key `tokens`. Raises
    DataError if the dump cannot be read."""
    picked = pick_parquet(path, numbers, _SHOWN, _MOST_GROUP_BYTES)
    tokens = read_stretches(path, numbers, decode, _MOST_GROUP_BYTES)
    found: list[dict[str, Any]] = [{} for _ in numbers]
    for name in picked.columns:
        column = picked[name]
        if isinstance(column, np.ndarray):
            for row, value in zip(found, column.tolist(), strict=True):
                row[name] = value
    return [_shown_fields(row) | {"tokens": one} for row, one in zip(found, tokens, strict=True)]


def _score(row: Mapping[str, Any]) -> float:
    score = row.get("score")
    return float(score) if isinstance(score, int | float) and not math.isnan(score) else -math.inf


def _shown_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that the page shows, with None for missing or invalid numbers."""
    numbers = {}
    for name in _NUMBERS:
        numbers[name] = row[name] if is_number(row.get(name)) else None
    return numbers | {name: row.get(name) for name in _TEXTS}


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
