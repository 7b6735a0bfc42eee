"""Reader of run folders for the report. Missing or damaged files, for example after a run was
killed, are skipped and listed.

The folder may come from another user, so no file outside the folder is read, sizes are limited, and
values that no run would write are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from hybridflow.observe.run_samples import OUTSIDE, Sample, not_readable, samples_of
from hybridflow.observe.timeline import WHOLE_STEP
from hybridflow.observe.tokens import Decode, open_decoder

CHANGES = "changes.jsonl"  # settings changed at each resume from a checkpoint
# a step has about 150 metrics in 7 KB
_MOST_RECORD_BYTES = 128 << 20
MOST_RECORDS = 250_000
_MOST_JSON_BYTES = 8 << 20
_MOST_FOLDERS = 32


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

    @property
    def name(self) -> str:
        """The run's name in its configuration, or else the name of its folder."""
        return str(self.setting("name") or self.path.resolve().name)

    def points(self, phase: str, name: str) -> list[tuple[float, float | None]]:
        """Return a metric's (step, value) pairs, ordered by step. If a step has several records,
        the last one is used."""
        found = {}
        for record in self.metrics:
            if record["phase"] == phase and name in record:
                value = record[name]
                if value is None or is_number(value):
                    found[record["step"]] = value
        return sorted(found.items())

    def val_sets(self) -> list[str]:
        """Return the metric prefix of each validation set, "val" or "val-NAME", in the order of the
        configuration."""
        found: dict[str, None] = {}
        for record in self.metrics:
            if record["phase"] == "val":
                for name in record:
                    match = re.fullmatch(r"(val(?:-[^/]+)?)/score", name)
                    if match:
                        found[match[1]] = None
        return list(found)

    def names(self, phase: str) -> set[str]:
        """Return the names of all metrics recorded in a phase."""
        names: set[str] = set()
        for record in self.metrics:
            if record.get("phase") == phase:
                names.update(record)
        return names

    def last_step(self, phase: str) -> int:
        """Return the last step recorded in a phase; 0 if there is none."""
        steps = (record["step"] for record in self.metrics if record.get("phase") == phase)
        return max(steps, default=0)

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
            if is_number(of_bfloat16):
                bound = max(bound, of_bfloat16)
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
            run.samples += samples_of(folder, folder.name, decode, run.missing)
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
    if not run.metrics:
        found.append(f"{_without_records(run.path / 'metrics.jsonl')}, so there are no charts")
    if not run.timeline:
        found.append(_without_records(run.path / "timeline.jsonl"))
    return [*found, *_lost_steps(run)]


def _without_records(path: Path) -> str:
    return f"{path.name}: has no records" if path.exists() else f"{path.name}: not found"


def decoder_of(path: Path) -> Decode | None:
    """Return a decoder that uses the tokenizer in the run folder; None if there is none."""
    model = path / "model"
    if not is_inside(model / "tokenizer.json", path):
        return None
    return open_decoder(model)


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
        missing.append(f"{path.name}: {OUTSIDE}")
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
        missing.append(f"{path.name}: {not_readable(error)}")
        return
    if skipped:
        missing.append(f"{path.name}: {removed_lines(skipped)}")
    size = path.stat().st_size if path.exists() else 0
    if size > _MOST_RECORD_BYTES:
        first = _MOST_RECORD_BYTES >> 20
        missing.append(f"{path.name}: only the first {first} MiB of {size >> 20} MiB are shown")


def _lost_steps(run: RunFolder) -> Iterator[str]:
    """Yield a sentence for each kind of record that is missing for some steps. A run that trains on
    another run's dumps may begin at any step.
    """
    first = None if run.setting("trainer.rollouts_from") else 1
    for phase in ("train", "sft", "reward"):
        recorded = [one["step"] for one in run.metrics if one["phase"] == phase]
        yield from _gaps("metrics.jsonl", phase, recorded, first)
    whole = []
    for span in run.timeline:
        if span["name"] == WHOLE_STEP and span.get("step") is not None:
            whole.append(span["step"])
    yield from _gaps("timeline.jsonl", "train", whole, first)


def _gaps(name: str, phase: str, steps: Iterable[int], first: int | None) -> Iterator[str]:
    there = sorted({step for step in steps if step > 0})
    if not there:
        return
    if first is None:
        first = there[0]
    lost: list[int] = []
    for before, after in pairwise([first - 1, *there]):
        begin = before + 1
        lost.extend(range(begin, min(after, begin + MOST_NAMES)))
    if lost:
        yield f"{name}: records of {phase} step {number_ranges(lost)} are missing"


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
        reason = f" ({meaning})" if meaning else ""
        missing.append(f"{path.name}: not found{reason}")
    except (OSError, ValueError) as error:
        wrong = "not valid JSON" if str(error).startswith("not JSON") else f"not readable ({error})"
        missing.append(f"{path.name}: {wrong}")
    return {}


def _require_inside(path: Path) -> None:
    """Raise ValueError if a file in the run folder is a link to a file outside the folder."""
    if not is_inside(path, path.parent):
        raise ValueError(OUTSIDE)
