"""The MLflow tracker. If MLFLOW_TRACKING_URI is not set, it writes `RUN_DIR/mlflow/mlflow.db` and
other files in that folder, which `mlflow ui` can read. `hybridflow track RUN_DIR --to mlflow` sends
a run to a server later.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.observe.append_only import AppendOnly, Dump
from hybridflow.observe.jsonl import finite
from hybridflow.observe.trackers.base import tracker

_MOST_PARAMETER = 500  # characters that every version of the server accepts
_AT_ONCE = 100  # maximum number of parameters per call
_BINS = 30
_OTHER = re.compile(r"[^\w.\- /:]")
# the tag in which MLflow's own `log_table`, which needs pandas, lists tables
_TABLES = "mlflow.loggedArtifacts"


@tracker("mlflow", library="mlflow")
class MlflowTracker(AppendOnly):
    """Publishes to one MLflow run, which a resumed run continues."""

    name = "mlflow"

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._folder = self.run_dir / "mlflow"
        self._client: Any = None
        self._id = ""
        self._tables: list[str] = []

    def destination(self) -> str:
        """Return the tracking address."""
        local = self._folder / "mlflow.db"
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{local}"

    def open(self, run_id: str | None) -> str:
        """Create the run with its parameters, or set the status of an existing run to running."""
        from mlflow.tracking import MlflowClient

        self._folder.mkdir(parents=True, exist_ok=True)
        self._client = client = MlflowClient(tracking_uri=self.destination())
        if run_id is None:
            tags = {"group": self.run.group} if self.run.group else {}
            created = client.create_run(self._experiment(), tags=tags, run_name=self.run.name)
            run_id = created.info.run_id
        else:
            client.update_run(run_id, status="RUNNING")
            tags = client.get_run(run_id).data.tags
            tables = json.loads(tags.get(_TABLES, "[]"))
            self._tables = [one["path"] for one in tables]
        self._id = str(run_id)
        self._parameters()
        return self._id

    def publish(self, number: int, step: int, wall_time: float, metrics: dict[str, float]) -> None:
        """Log the metrics of a step in one call."""
        from mlflow.entities import Metric

        at = int(wall_time * 1000)
        found = []
        for name, value in metrics.items():
            found.append(Metric(metric_name(name), value, at, step))
        self._client.log_batch(self._id, metrics=found)

    def publish_dump(self, number: int, dump: Dump) -> None:
        """Write the samples as a table, and the distributions as histograms (edges and counts)."""
        name = f"{dump.kind}/samples_{dump.step:06d}.json"
        rows = [[dump.step, *row] for row in dump.rows]
        self._text(name, {"columns": ["step", *dump.columns], "data": rows})
        self._tables.append(name)
        tables = [{"path": path, "type": "table"} for path in self._tables]
        self._client.set_tag(self._id, _TABLES, json.dumps(tables))
        found = {}
        for column, values in dump.distributions.items():
            counts, edges = np.histogram(values, bins=_BINS)
            found[column] = {"counts": counts.tolist(), "edges": edges.tolist()}
        self._text(f"{dump.kind}/histograms_{dump.step:06d}.json", found)

    def publish_report(self, path: Path) -> None:
        """Copy the report to the run's artifacts."""
        self._client.log_artifact(self._id, str(path))

    def finish(self, complete: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.run.project)
        if found is not None:
            return str(found.experiment_id)
        local = os.environ.get("MLFLOW_TRACKING_URI") is None
        where = (self._folder / "artifacts").as_uri() if local else None
        return str(self._client.create_experiment(self.run.project, artifact_location=where))

    def _parameters(self) -> None:
        """Log the configuration both as parameters, which cannot be changed later, and as a file,
        which is replaced if the run is resumed with other settings.
        """
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        found = []
        for name, value in leaves(self.run.config):
            key = metric_name(name)
            if key not in known:
                text = str(value)[:_MOST_PARAMETER]
                found.append(Param(key, text))
        for first in range(0, len(found), _AT_ONCE):
            batch = found[first : first + _AT_ONCE]
            self._client.log_batch(self._id, params=batch)
        self._text("config.json", self.run.config)

    def _text(self, name: str, value: Any) -> None:
        text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, default=str)
        self._client.log_text(self._id, text, name)


def metric_name(name: str) -> str:
    """Convert a name to one that MLflow permits. As in verl, `val/pass@4` becomes
    `val/pass_at_4`.
    """
    return _OTHER.sub("_", name.replace("@", "_at_"))


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value in a nested mapping."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
