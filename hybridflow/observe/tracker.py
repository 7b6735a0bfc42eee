"""Distribution of a run's metrics to the trackers listed in `trainer.loggers`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from hybridflow.config.entries import TRACKERS
from hybridflow.observe.background import Background
from hybridflow.observe.exporter import Exporter
from hybridflow.observe.trackers.base import PHASES, RESERVED, Phase, ShowsRollouts, Sink


class Tracker:
    """Sends metrics to several trackers. Trackers that do more than write local files run in
    separate processes (`Background`).

    Args:
        run_dir: the run folder, to which trackers write once the first metrics arrive.
        loggers: names of trackers (`hybridflow.observe.trackers`), or `path/to/file.py:name`.
        timeout_s: how long `close` waits for each tracker in a separate process, in seconds.
        exporter: serves the metrics of the running job.

    Raises:
        ConfigError: a tracker does not exist.
    """

    def __init__(
        self,
        run_dir: str | Path,
        loggers: Sequence[str] = ("console", "jsonl", "tensorboard"),
        timeout_s: float = 60.0,
        exporter: Exporter | None = None,
    ) -> None:
        self._sinks: list[Sink] = [exporter] if exporter is not None else []
        self._apart: list[Background] = []
        for name in dict.fromkeys(loggers):
            entry = TRACKERS.get(name)
            if entry.in_driver:
                self._sinks.append(entry.make(Path(run_dir)))
            else:
                self._apart.append(Background(name, Path(run_dir), timeout_s))
        # local files first: the others read metrics.jsonl
        self._sinks += self._apart

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase = "train") -> None:
        """Record the metrics of one step. Values are numbers, including numpy and torch scalars."""
        _check_phase(phase)
        if reserved := RESERVED & metrics.keys():
            raise ValueError(f"metric name {sorted(reserved)[0]!r} is reserved")
        values = {name: _number(name, value) for name, value in metrics.items()}
        wall_time = time.time()
        for sink in self._sinks:
            sink.log(int(step), phase, wall_time, values)

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Drop the phase's records after `step`. Called on resume, so that repeated steps are
        recorded once."""
        _check_phase(phase)
        for sink in self._sinks:
            sink.truncate_after(phase, step)

    def rollouts(self, step: int, path: Path) -> None:
        """Send a dump to the trackers, if it has been written."""
        for sink in self._sinks if path.exists() else ():
            if isinstance(sink, ShowsRollouts):
                sink.rollouts(step, path)

    def report(self, path: Path) -> None:
        """Record the report."""
        for sink in self._sinks:
            if isinstance(sink, ShowsRollouts):
                sink.report(path)

    def close_files(self) -> None:
        """Flush and close this process's files. A later record reopens them."""
        for sink in self._sinks:
            if not isinstance(sink, Background | Exporter):
                sink.close()

    def close(self) -> list[str]:
        """Close all trackers. Returns a sentence for each one that has lost records or did not
        exit.
        """
        for one in self._apart:
            one.end()  # all have the same deadline
        for sink in self._sinks:
            sink.close()
        return [said for one in self._apart if (said := one.loss())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _check_phase(phase: str) -> None:
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} must be a number, got {value!r}") from error
