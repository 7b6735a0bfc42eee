"""Distribution of a run's metrics to the trackers listed in `trainer.loggers`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from hybridflow.config.entries import TRACKERS
from hybridflow.observe.trackers.base import PHASES, RESERVED, Phase


class Tracker:
    """Sends metrics to several trackers.

    Args:
        run_dir: the run folder, to which trackers write once the first metrics arrive.
        loggers: names of trackers (`hybridflow.observe.trackers`), or `path/to/file.py:name`.

    Raises:
        ConfigError: a tracker does not exist.
    """

    def __init__(
        self, run_dir: str | Path, loggers: Sequence[str] = ("console", "jsonl", "tensorboard")
    ) -> None:
        self._sinks = [TRACKERS.get(name)(Path(run_dir)) for name in dict.fromkeys(loggers)]

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

    def close(self) -> None:
        """Flush and close the files."""
        for sink in self._sinks:
            sink.close()

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
        raise TypeError(f"metric {name!r} is not a number: {value!r}") from error
