"""`metrics.jsonl`: one flat object per line.

`{"step": 3, "phase": "train", "wall_time": 1700000000.0, "critic/score/mean": 0.5, ...}`. A NaN or
infinite value is written as null, and a `"warning"` in the line names the metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from hybridflow.observe.jsonl import JsonlWriter
from hybridflow.observe.trackers.base import Phase, tracker


@tracker("jsonl", in_driver=True)
class JsonlTracker:
    """Writes metrics to `metrics.jsonl` in the run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = JsonlWriter(run_dir / "metrics.jsonl")

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        odd = {}
        for name, value in metrics.items():
            if not math.isfinite(value):
                odd[name] = value
        head = {"step": step, "phase": phase, "wall_time": round(wall_time, 3)}
        record: dict[str, object] = {**head, **metrics, **dict.fromkeys(odd)}
        if odd:
            record["warning"] = "not finite: " + ", ".join(
                f"{name}={value}" for name, value in odd.items()
            )
        self._writer.write(record)

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Rewrite the file without the phase's later lines."""
        self._writer.keep(
            lambda record: record.get("phase") != phase or record.get("step", 0) <= step
        )

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
