"""The protocol of a tracker, and its registration.

A built-in tracker is the file of that name in this package; `trainer.loggers` also accepts
`path/to/file.py:name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from hybridflow.config.entries import TRACKERS

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


F = TypeVar("F", bound=Callable[[Path], Sink])


def tracker(name: str) -> Callable[[F], F]:
    """Register a class or function that creates a `Sink` for a run folder."""
    return TRACKERS.entry(name, lambda make: make)
