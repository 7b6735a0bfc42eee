"""The Weights & Biases tracker. If no API key is found, it writes `RUN_DIR/wandb/offline-run-*`,
which `wandb sync` uploads later. WANDB_MODE, WANDB_RUN_ID and the library's other environment
variables are honoured.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from hybridflow.observe.append_only import AppendOnly, Dump
from hybridflow.observe.trackers.base import tracker

_STEP = "step"  # the x-axis; also set in rows without training metrics


@tracker("wandb", library="wandb")
class WandbTracker(AppendOnly):
    """Publishes to one W&B run, which a resumed run continues under the same id."""

    name = "wandb"

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._run: Any = None
        self._mode = ""
        # staged files of artifacts too, or an offline folder would depend on the home folder
        os.environ.setdefault("WANDB_DATA_DIR", str(self.run_dir / "wandb" / "data"))
        os.environ.setdefault("WANDB_CACHE_DIR", str(self.run_dir / "wandb" / "cache"))

    def destination(self) -> str:
        """Return W&B's mode and, in online mode, the server."""
        import wandb

        # also finds a key that `wandb login` stored; contacts no server
        self._mode = os.environ.get("WANDB_MODE") or (
            "online" if wandb.login(prompt=False) else "offline"
        )
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        return f"online {server}" if self._mode == "online" else self._mode

    def open(self, run_id: str | None) -> str:
        """Start or continue the run."""
        import wandb

        run_id = run_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=self.run.project,
            group=self.run.group,
            name=self.run.name,
            id=run_id,
            dir=str(self.run_dir),
            config=self.run.config,
            resume="allow",
            mode=self._mode,
            # host, user and program are not published, as in environment.json
            settings=wandb.Settings(
                console="off", silent=True, x_disable_machine_info=True, host="-", username="-"
            ),
        )
        # validations and training steps are logged in any order, so W&B's own step only counts
        self._run.define_metric("*", step_metric=_STEP)
        return run_id

    def publish(self, number: int, step: int, wall_time: float, metrics: dict[str, float]) -> None:
        """Log the metrics of a step as one row of the run's history."""
        self._run.log({**metrics, _STEP: step}, step=number)

    def publish_dump(self, number: int, dump: Dump) -> None:
        """Log the samples as a table and the distributions as histograms."""
        import wandb

        found = {
            f"{dump.kind}/{name}": wandb.Histogram(values)
            for name, values in dump.distributions.items()
            if len(values)
        }
        table = wandb.Table(columns=["step", *dump.columns], data=_numbered(dump))
        self._run.log({f"{dump.kind}/samples": table, **found, _STEP: dump.step}, step=number)

    def publish_report(self, path: Path) -> None:
        """Log the report as an artifact."""
        import wandb

        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, complete: bool) -> None:
        """End the run. In online mode, waits for pending uploads."""
        self._run.finish(exit_code=0 if complete else 1)


def _numbered(dump: Dump) -> list[list[Any]]:
    return [[dump.step, *row] for row in dump.rows]
