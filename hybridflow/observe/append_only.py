"""Base of trackers whose records cannot be changed later: each is published once, over kills and
resumes of a run.

`RUN_DIR/trackers/NAME-DESTINATION.jsonl` lists what is published. Steps that a resumed run repeats
keep the values of the first time; records that are missing are read from `metrics.jsonl`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hybridflow.batch import iter_parquet, parquet_rows, pick_parquet
from hybridflow.config.outside_yaml import read_outside_yaml
from hybridflow.observe.jsonl import JsonlWriter, read_jsonl
from hybridflow.observe.rollouts import list_dumps
from hybridflow.observe.trackers.base import PHASES, RESERVED, Phase

# columns of a dump, as far as it has them
_SHOWN = (
    "data_source",
    "prompt_text",
    "response_text",
    "ground_truth",
    "score",
    "advantage",
    "response_length",
    "finish_reason",
)
DISTRIBUTIONS = ("score", "advantage", "response_length", "logprob_diff_mean")
_MOST_GROUP_BYTES = 256 << 20


@dataclass(frozen=True)
class Published:
    """A run as its tracker shows it.

    Attributes:
        config: the run's configuration, nested.
        samples: rows of a sample table.
    """

    name: str
    project: str
    group: str | None
    samples: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Dump:
    """Samples and distributions of one dump.

    Attributes:
        kind: name of its folder, for example validation.
        rows: a sample per row, with the values of `columns`.
        distributions: {column: values [B]}, finite ones.
    """

    kind: str
    step: int
    columns: Sequence[str]
    rows: list[list[Any]]
    distributions: dict[str, np.ndarray]


class AppendOnly:
    """A tracker over a library. Subclasses open the library's run and publish to it."""

    name: str

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.resolve()
        self._open = False
        self._ledger: JsonlWriter
        self._lock: BinaryIO
        self._known: set[tuple[str, int]] = set()
        self.run = Published("", "", None, 0, {})

    # ---- for subclasses

    def destination(self) -> str:
        """Return where records go, for example an address; each has its own list of records."""
        raise NotImplementedError

    def open(self, run_id: str | None) -> str:
        """Create the library's run, or continue the one with this id. Returns its id."""
        raise NotImplementedError

    def publish(self, number: int, step: int, wall_time: float, metrics: dict[str, float]) -> None:
        """Publish a record. `number` counts the records of all sessions, from 0."""
        raise NotImplementedError

    def publish_dump(self, number: int, dump: Dump) -> None:
        """Publish samples and distributions."""
        raise NotImplementedError

    def publish_report(self, path: Path) -> None:
        """Publish the report as an artifact."""
        raise NotImplementedError

    def finish(self, complete: bool) -> None:
        """End the library's run; `complete` is False if the job may go on later."""
        raise NotImplementedError

    # ---- the sink

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Publish a record, unless it already is."""
        self._start()
        if (phase, step) not in self._known:
            found = {own_name(phase, name): value for name, value in metrics.items()}
            self.publish(len(self._known), step, wall_time, found)
            self._mark(phase, step)

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Publish what is missing of the records that stay."""
        for record in self._records():
            if record["phase"] == phase and record["step"] <= step:
                self._log(record)

    def rollouts(self, step: int, path: Path) -> None:
        """Publish a dump's samples and distributions, unless they already are."""
        self._start()
        kind = path.parent.name
        if (kind, step) not in self._known and self.run.samples:
            self.publish_dump(len(self._known), read_dump(path, step, self.run.samples))
            self._mark(kind, step)

    def report(self, path: Path) -> None:
        """Publish the report."""
        self._start()
        kind = f"report {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        if (kind, 0) not in self._known:
            self.publish_report(path)
            self._mark(kind, 0)

    def catch_up(self) -> Iterator[tuple[Phase, int]]:
        """Publish what is missing, records first."""
        for record in self._records():
            if self._log(record):
                yield record["phase"], record["step"]
        folders = [*self.run_dir.glob("rollouts*"), *self.run_dir.glob("validation*")]
        for folder in sorted(folders):
            for step, path in list_dumps(folder):
                self.rollouts(step, path)

    def close(self) -> None:
        """End the run. A later record continues it."""
        if self._open:
            self._open = False
            # written at the end of a job, and removed when it goes on
            self.finish((self.run_dir / "summary.json").exists())
            self._ledger.close()
            self._lock.close()

    def _records(self) -> Iterator[dict[str, Any]]:
        for record in read_jsonl(self.run_dir / "metrics.jsonl"):
            if record.get("phase") in PHASES and isinstance(record.get("step"), int):
                yield record

    def _log(self, record: Mapping[str, Any]) -> bool:
        self._start()
        step, phase = record["step"], record["phase"]
        if (phase, step) in self._known:
            return False
        metrics = {}
        for name, value in record.items():
            if name not in RESERVED:
                metrics[name] = math.nan if value is None else float(value)
        self.log(step, phase, float(record.get("wall_time", 0.0)), metrics)
        return True

    def _mark(self, kind: str, step: int) -> None:
        self._known.add((kind, step))
        self._ledger.write({"kind": kind, "step": step})

    def _start(self) -> None:
        if self._open:
            return
        self.run = published(self.run_dir)
        where = self.destination()
        short = hashlib.sha256(where.encode()).hexdigest()[:8]
        path = self.run_dir / "trackers" / f"{self.name}-{short}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.with_suffix(".lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # a run in progress, or the tracker of a killed driver, which ends at its deadline
            print(f"waiting for another process that sends {self.run_dir} to {self.name}")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        lines = list(read_jsonl(path))
        run_id = next((line["id"] for line in lines if "id" in line), None)
        self._known |= {(line["kind"], line["step"]) for line in lines if "kind" in line}
        found = self.open(run_id)
        self._ledger = JsonlWriter(path)
        if run_id is None:
            self._ledger.write({"id": found, "destination": where})
        self._open = True


def published(run_dir: Path) -> Published:
    """Read the name, project and settings of a run from its config.yaml."""
    try:
        _, config = read_outside_yaml(run_dir / "config.yaml")
    except (OSError, ValueError):  # a tracker without a run
        config = {}
    trainer = config.get("trainer") or {}
    return Published(
        str(config.get("name") or run_dir.name),
        str(trainer.get("project") or "hybridflow"),
        trainer.get("group"),
        int(trainer.get("tracked_samples", 8)),
        config,
    )


def read_dump(path: Path, step: int, samples: int) -> Dump:
    """Read distributions and at most `samples` rows, evenly spaced, of a dump."""
    count = parquet_rows(path)
    picked = np.unique(np.linspace(0, max(count - 1, 0), min(samples, count)).astype(int))
    found = pick_parquet(path, picked.tolist(), _SHOWN, _MOST_GROUP_BYTES)
    shown = [name for name in _SHOWN if name in found]
    rows = [[plain(found[name][row]) for name in shown] for row in range(len(picked))]
    return Dump(path.parent.name, step, shown, rows, read_distributions(path))


def read_distributions(path: Path) -> dict[str, np.ndarray]:
    """Return the finite values [B] of the columns `DISTRIBUTIONS` that a dump has."""
    pieces = list(iter_parquet(path, (), DISTRIBUTIONS))
    found = {}
    for name in pieces[0].columns if pieces else ():
        values = np.concatenate([piece[name] for piece in pieces]).astype(np.float64)
        found[name] = values[np.isfinite(values)]
    return found


def own_name(phase: Phase, name: str) -> str:
    """Return the name of a metric in a tracker, where records of all phases share their steps:
    timing_s/step of a warm start is sft/timing_s/step."""
    shared = phase in ("sft", "reward") and not name.startswith(f"{phase}/")
    return f"{phase}/{name}" if shared else name


def plain(value: Any) -> Any:
    """Return a number as Python's own, and any other value as text."""
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, int | float | str) else json.dumps(value, default=str)
