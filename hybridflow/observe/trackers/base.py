"""What a tracker does, and how one is registered.

A built-in tracker is a file of this package that bears its name; `trainer.loggers` also takes
`path/to/file.py:name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from hybridflow.config.entries import TRACKERS

Phase = Literal["train", "val", "sft", "reward"]
PHASES: tuple[Phase, ...] = ("train", "val", "sft", "reward")
# keys of a record that no metric may take
RESERVED = frozenset({"step", "phase", "wall_time", "warning"})


class Sink(Protocol):
    """Keeps the metrics of one run."""

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step; `wall_time` is in seconds since the epoch, and values may
        be NaN."""

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Forget the phase's records after `step`, which will be logged again."""

    def close(self) -> None:
        """Write what is left and close files."""


F = TypeVar("F", bound=Callable[[Path], Sink])


def tracker(name: str) -> Callable[[F], F]:
    """Register a class or function that makes a `Sink` of the run folder."""
    return TRACKERS.entry(name, lambda make: make)
