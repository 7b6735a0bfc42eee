"""Reading a run folder for the report. What is missing or damaged is noted and left out, as after a kill."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import list_dumps, read_rollouts
from hybridflow.observe.timeline import read_timeline
from hybridflow.observe.tokens import Decode, open_decoder, read_stretches

CHANGES = "changes.jsonl"  # what differed at each start that went on from a checkpoint
_ROWS_PER_DUMP = 4  # two of the best and two of the worst


@dataclass(frozen=True)
class Sample:
    """Rows picked from one dump, best first."""

    kind: str
    step: int
    count: int
    mean_score: float | None
    rows: list[dict[str, Any]]


@dataclass
class RunFolder:
    """The contents of a run folder. `missing` says in words what is not there."""

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
        """(step, value) of a metric, by step; the last record of a step counts."""
        found = {
            record["step"]: record[name]
            for record in self.metrics
            if record["phase"] == phase and name in record and (record[name] is None or _is_number(record[name]))
        }
        return sorted(found.items())

    def val_sets(self) -> list[str]:
        """What the metrics of each validation set begin with, "val" or "val-NAME", in the configuration's order."""
        names = (name for record in self.metrics if record["phase"] == "val" for name in record)
        found = (re.fullmatch(r"(val(?:-[^/]+)?)/score", name) for name in names)
        return list(dict.fromkeys(match[1] for match in found if match))

    def names(self, phase: str) -> set[str]:
        """Names of all metrics of a phase."""
        return {name for record in self.metrics if record.get("phase") == phase for name in record}

    def values(self, phase: str, name: str) -> list[float]:
        """The values of a metric by step, gaps left out."""
        return [value for _, value in self.points(phase, name) if value is not None]

    def setting(self, dotted: str) -> Any:
        """A value of config.yaml by its dotted key; None where there is none."""
        node: Any = self.config
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node


def load_run(path: Path) -> RunFolder:
    """Read everything there is."""
    run = RunFolder(path)
    run.config_text, run.config = _config(path / "config.yaml", run.missing)
    run.summary = _json(path / "summary.json", "the run was killed, or is still running", run.missing)
    run.environment = _json(path / "environment.json", "", run.missing)
    records = read_jsonl(path / "metrics.jsonl")
    run.metrics = [
        record for record in records if isinstance(record.get("step"), int) and isinstance(record.get("phase"), str)
    ]
    run.timeline = read_timeline(path / "timeline.jsonl")
    run.changes = [
        record
        for record in read_jsonl(path / CHANGES)
        if isinstance(record.get("step"), int) and isinstance(record.get("changes"), list)
    ]
    for name, found, so in (("metrics.jsonl", run.metrics, ", so no charts"), ("timeline.jsonl", run.timeline, "")):
        if not found:
            run.missing.append(f"{name}: {'holds no record' if (path / name).exists() else 'not there'}{so}")
    decode = open_decoder(path / "model")
    for kind in ("rollouts", "validation", *sorted(folder.name for folder in path.glob("validation-*"))):
        run.samples += _samples(path / kind, kind, decode, run.missing)
    return run


def pick_rows(rows: list[dict[str, Any]], count: int = _ROWS_PER_DUMP) -> list[dict[str, Any]]:
    """The best and the worst rows by score, half each, best first; of different prompts where scores are equal."""
    ranked = sorted(rows, key=_score, reverse=True)
    if len(ranked) <= count:
        return ranked
    good = _varied(ranked, count - count // 2)
    chosen = {id(row) for row in good}
    bad = _varied([row for row in reversed(ranked) if id(row) not in chosen], count // 2)
    return good + bad[::-1]


def _varied(ranked: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first `count` rows; among those that score like the first, one of each prompt comes before a second one."""
    seen: set[Any] = set()
    first, later = [], []
    for row in ranked:
        if _score(row) == _score(ranked[0]) and row.get("uid") not in seen:
            seen.add(row.get("uid"))
            first.append(row)
        else:
            later.append(row)
    return (first + later)[:count]


def _samples(folder: Path, kind: str, decode: Decode | None, missing: list[str]) -> list[Sample]:
    """First, middle and last dump of the rollouts; first and last of the validation answers."""
    dumps = list_dumps(folder)
    if not dumps:
        missing.append(f"{kind}/: no dump")
        return []
    wanted = sorted({0, len(dumps) // 2, len(dumps) - 1} if kind == "rollouts" else {0, len(dumps) - 1})
    found = []
    for step, path in (dumps[index] for index in wanted):
        try:
            rows = read_rollouts(path)
        except DataError as error:
            missing.append(f"{kind}/{path.name}: cannot be read ({str(error).rsplit(': ', 1)[-1]})")
            continue
        scores = [row["score"] for row in rows if _is_number(row.get("score"))]
        mean = sum(scores) / len(scores) if scores else None
        numbers, picked = {id(row): number for number, row in enumerate(rows)}, pick_rows(rows)
        tokens = read_stretches(path, [numbers[id(row)] for row in picked], decode)
        shown = [_shown_fields(row) | {"tokens": one} for row, one in zip(picked, tokens, strict=True)]
        found.append(Sample(kind, step, len(rows), mean, shown))
    return found


def _score(row: Mapping[str, Any]) -> float:
    score = row.get("score")
    return float(score) if isinstance(score, int | float) and not math.isnan(score) else -math.inf


def _shown_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a row; None stands for a number that is missing or not a number."""
    numbers = {
        name: row[name] if _is_number(row.get(name)) else None
        for name in ("score", "response_length", "logprob_diff_mean", "advantage", "turns", "tool_calls")
    }
    return numbers | {
        name: row.get(name)
        for name in ("prompt_text", "response_text", "ground_truth", "finish_reason", "reward_extra", "agent_failure")
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _config(path: Path, missing: list[str]) -> tuple[str, dict[str, Any]]:
    import yaml

    text = _text(path, "", missing)
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError:
        missing.append("config.yaml: not valid YAML; shown as it is")
        parsed = None
    return text, parsed if isinstance(parsed, dict) else {}


def _json(path: Path, meaning: str, missing: list[str]) -> dict[str, Any]:
    text = _text(path, meaning, missing)
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        missing.append(f"{path.name}: not valid JSON")
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _text(path: Path, meaning: str, missing: list[str]) -> str:
    if not path.exists():
        missing.append(f"{path.name}: not there" + (f" ({meaning})" if meaning else ""))
        return ""
    return path.read_text(encoding="utf-8", errors="replace")
