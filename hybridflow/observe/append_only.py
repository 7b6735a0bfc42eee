"""Base class of trackers whose records cannot be changed later. Each record is published only once,
even if the run is killed and resumed.

`RUN_DIR/trackers/NAME-DESTINATION.jsonl` lists the published records. Steps that a resumed run
repeats keep their first values. Missing records are read from `metrics.jsonl`.
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
    """Information about a run, published to a tracker.

    Attributes:
        config: the run's configuration, as nested mappings.
        samples: number of rows in each sample table.
    """

    name: str
    project: str
    group: str | None
    samples: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Dump:
    """The samples and distributions in one dump.

    Attributes:
        kind: name of the dump's folder, for example validation.
        rows: one list per sample, with the values of `columns`.
        distributions: {column: finite values [B]}.
    """

    kind: str
    step: int
    columns: Sequence[str]
    rows: list[list[Any]]
    distributions: dict[str, np.ndarray]


class AppendOnly:
    """A tracker that publishes through a library. Subclasses open the library's run and publish to
    it.
    """

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
        """Return where records are sent, for example a server address. A separate list of published
        records is kept for each destination.
        """
        raise NotImplementedError

    def open(self, run_id: str | None) -> str:
        """Create the library's run, or continue the one with this id. Returns its id."""
        raise NotImplementedError

    def publish(self, number: int, step: int, wall_time: float, metrics: dict[str, float]) -> None:
        """Publish a record. `number` is its zero-based index across all sessions."""
        raise NotImplementedError

    def publish_dump(self, number: int, dump: Dump) -> None:
        """Publish samples and distributions."""
        raise NotImplementedError

    def publish_report(self, path: Path) -> None:
        """Publish the report as an artifact."""
        raise NotImplementedError

    def finish(self, complete: bool) -> None:
        """End the library's run. `complete` is False if the job may be continued later."""
        raise NotImplementedError

    # ---- the sink

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Publish a record, unless it has already been published."""
        self._start()
        if (phase, step) not in self._known:
            found = {own_name(phase, name): value for name, value in metrics.items()}
            self.publish(len(self._known), step, wall_time, found)
            self._mark(phase, step)

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Publish all records up to `step` that have not been published yet."""
        for record in self._records():
            if record["phase"] == phase and record["step"] <= step:
                self._log(record)

    def rollouts(self, step: int, path: Path) -> None:
        """Publish a dump's samples and distributions, unless they have already been published."""
        self._start()
        kind = path.parent.name
        if (kind, step) not in self._known and self.run.samples:
            self.publish_dump(len(self._known), read_dump(path, step, self.run.samples))
            self._mark(kind, step)

    def report(self, path: Path) -> None:
        """Publish the report."""
        self._start()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        kind = f"report {digest[:16]}"
        if (kind, 0) not in self._known:
            self.publish_report(path)
            self._mark(kind, 0)

    def catch_up(self) -> Iterator[tuple[Phase, int]]:
        """Publish everything that has not been published yet, records first."""
        for record in self._records():
            if self._log(record):
                yield record["phase"], record["step"]
        folders = [*self.run_dir.glob("rollouts*"), *self.run_dir.glob("validation*")]
        for folder in sorted(folders):
            for step, path in list_dumps(folder):
                self.rollouts(step, path)

    def close(self) -> None:
        """End the library's run. A later record reopens it."""
        if self._open:
            self._open = False
            # written at the end of a job, and removed when the job is continued
            self.finish((self.run_dir / "summary.json").exists())
            self._ledger.close()
            self._lock.close()

    def _records(self) -> Iterator[dict[str, Any]]:
        for record in read_jsonl(self.run_dir / "metrics.jsonl"):
            if record.get("phase") in PHASES and isinstance(record.get("step"), int):
                yield record

    def _log(self, record: Mapping[str, Any]) -> bool:
        self._start()
        step = record["step"]
        phase = record["phase"]
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
        name=str(config.get("name") or run_dir.name),
        project=str(trainer.get("project") or "hybridflow"),
        group=trainer.get("group"),
        samples=int(trainer.get("tracked_samples", 8)),
        config=config,
    )


def read_dump(path: Path, step: int, samples: int) -> Dump:
    """Read a dump's distributions, and at most `samples` of its rows, evenly spaced."""
    count = parquet_rows(path)
    spaced = np.linspace(0, max(count - 1, 0), min(samples, count))
    picked = np.unique(spaced.astype(int))
    found = pick_parquet(path, picked.tolist(), _SHOWN, _MOST_GROUP_BYTES)
    shown = [name for name in _SHOWN if name in found]
    rows = []
    for row in range(len(picked)):
        rows.append([plain(found[name][row]) for name in shown])
    return Dump(path.parent.name, step, shown, rows, read_distributions(path))


def read_distributions(path: Path) -> dict[str, np.ndarray]:
    """Return the finite values [B] of each column in `DISTRIBUTIONS` that a dump contains."""
    pieces = list(iter_parquet(path, (), DISTRIBUTIONS))
    found = {}
    for name in pieces[0].columns if pieces else ():
        values = np.concatenate([piece[name] for piece in pieces]).astype(np.float64)
        found[name] = values[np.isfinite(values)]
    return found


def own_name(phase: Phase, name: str) -> str:
    """Return the name under which trackers log a metric. In trackers, all phases share one step
    axis, so metrics of supervised and reward training get a prefix: timing_s/step becomes
    sft/timing_s/step.
    """
    shared = phase in ("sft", "reward") and not name.startswith(f"{phase}/")
    return f"{phase}/{name}" if shared else name


def plain(value: Any) -> Any:
    """Convert a number to a plain Python number, and any other value to text."""
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, int | float | str) else json.dumps(value, default=str)
