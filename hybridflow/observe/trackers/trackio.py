"""The Trackio tracker. Trackio stores a project in one local file, in `RUN_DIR/trackio` unless
TRACKIO_DIR is set. `TRACKIO_DIR=RUN_DIR/trackio trackio sync --project PROJECT --space-id SPACE`
uploads it later.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from hybridflow.observe.append_only import AppendOnly, Dump
from hybridflow.observe.trackers.base import tracker


@tracker("trackio", library="trackio")
class TrackioTracker(AppendOnly):
    """Publishes to one Trackio run, which a resumed run continues."""

    name = "trackio"

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        # read when the library is imported
        os.environ.setdefault("TRACKIO_DIR", str(self.run_dir / "trackio"))
        self._run: Any = None

    def destination(self) -> str:
        """Return the Space to which metrics are uploaded, or the folder with the local files."""
        return os.environ.get("TRACKIO_SPACE_ID") or os.environ["TRACKIO_DIR"]

    def open(self, run_id: str | None) -> str:
        """Start or continue the run. Trackio looks up a run by its name, so the name is also the
        id.
        """
        import trackio

        run_id = run_id or f"{self.run.name}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(
            self.run.project,
            run_id,
            group=self.run.group,
            config=self.run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return run_id

    def publish(self, number: int, step: int, wall_time: float, metrics: dict[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log(metrics, step=step)

    def publish_dump(self, number: int, dump: Dump) -> None:
        """Log the samples as a table and the distributions as histograms."""
        import trackio

        found: dict[str, Any] = {
            f"{dump.kind}/{name}": trackio.Histogram(values)
            for name, values in dump.distributions.items()
            if len(values)
        }
        found[f"{dump.kind}/samples"] = trackio.Table(
            columns=list(dump.columns), data=list(map(list, dump.rows))
        )
        self._run.log(found, step=dump.step)

    def publish_report(self, path: Path) -> None:
        """Log the report as an artifact."""
        self._run.log_artifact(path, name="report", type="report")

    def finish(self, complete: bool) -> None:
        """End the run, after the library's queue has been written."""
        self._run.finish()
