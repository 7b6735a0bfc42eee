"""The protocol of a tracker, and its registration. A built-in tracker is defined in the file of the
same name in this package; `trainer.loggers` also accepts `path/to/file.py:name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeVar, runtime_checkable

from hybridflow.config.entries import TRACKERS, TrackerEntry

Phase = Literal["train", "val", "sft", "reward"]
PHASES: tuple[Phase, ...] = ("train", "val", "sft", "reward")
# reserved keys of a record
RESERVED = frozenset({"step", "phase", "wall_time", "warning"})


class Sink(Protocol):
    """A destination for the metrics of one run."""

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step. `wall_time` is in seconds since the epoch; values may be
        NaN."""

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Drop the phase's records after `step`, because they will be logged again."""

    def close(self) -> None:
        """Flush and close all files."""


@runtime_checkable
class ShowsRollouts(Protocol):
    """A sink that also shows samples, distributions and the report."""

    def rollouts(self, step: int, path: Path) -> None:
        """Record a dump (`hybridflow.observe.rollouts`) that has been written. The name of its
        folder is the kind of dump: rollouts or validation, possibly followed by `-NAME`.
        """

    def report(self, path: Path) -> None:
        """Record the report of a finished run."""


@runtime_checkable
class CatchesUp(Protocol):
    """A sink that can catch up by reading the records it missed from the run folder."""

    def catch_up(self) -> Iterator[tuple[Phase, int]]:
        """Record everything that has not been recorded yet. Yields (phase, step) for each added
        record of `metrics.jsonl`.
        """


F = TypeVar("F", bound=Callable[[Path], Sink])


def tracker(name: str, *, in_driver: bool = False, library: str = "") -> Callable[[F], F]:
    """Register a class or function that creates a `Sink` for a run folder.

    Args:
        in_driver: True to run the tracker in the driver, whose steps wait for it; only for trackers
            that write local files. Otherwise, it runs in a separate process and cannot stop or slow
            down the run.
        library: import name of the package that it requires; checked before the run starts.
    """
    return TRACKERS.entry(name, lambda make: TrackerEntry(make, in_driver, library))
