"""Reads the folders of trackers with the libraries' own readers, in a process that has them:
`python -m tests.unit.observe.tracker_folders RUN_DIR NAME...` prints what they hold as JSON."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LIBRARIES = Path(sys.prefix) / "trackers"  # by requirements/setup.sh
_BLOCK = 1 << 15


def with_libraries() -> dict[str, str]:
    """The environment of a process that has the trackers' libraries, and no account."""
    path = [str(LIBRARIES), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "WANDB_MODE": "offline"}


def read(run_dir: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By tracker: {"points": [[metric, step, value]], "config", "name", "group", "samples": {kind: rows},
    "histograms": count, "reports": [text], "ids": [run ids]}."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(run_dir), *names],
        env=with_libraries(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _wandb(run_dir: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"points": [], "samples": {}, "histograms": 0, "reports": [], "ids": []}
    for folder in sorted((run_dir / "wandb").glob("offline-run-*")):
        [file] = folder.glob("*.wandb")
        for data in _records(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                found["ids"].append(record.run.run_id)
                found["host"] = record.run.host
                found["name"] = record.run.display_name
                found["group"] = record.run.run_group
                found["project"] = record.run.project
                found["config"] = {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif record.HasField("history"):
                row: dict[str, Any] = {}
                for item in record.history.item:
                    *outer, last = [item.key] if item.key else item.nested_key
                    into = row
                    for name in outer:
                        into = into.setdefault(name, {})
                    into[last] = json.loads(item.value_json)
                _wandb_row(folder, row, found)
            elif record.HasField("request") or record.HasField("artifact"):
                artifact = record.artifact
                for entry in artifact.manifest.contents if artifact.type == "report" else ():
                    found["reports"].append(Path(entry.local_path).read_text())
    return found


def _wandb_row(folder: Path, row: dict[str, Any], found: dict[str, Any]) -> None:
    step = row.pop("step")
    for key, value in row.items():
        if isinstance(value, dict) and value.get("_type") == "table-file":
            table = json.loads((folder / "files" / value["path"]).read_text())
            found["samples"].setdefault(key, []).extend(table["data"])
        elif isinstance(value, dict):
            found["histograms"] += value.get("_type") == "histogram"
        elif not key.startswith("_"):
            found["points"].append([key, step, float(value)])


def _records(data: bytes) -> Iterator[bytes]:
    """Records of the LevelDB log that a .wandb file is."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def _mlflow(run_dir: Path) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.resolve()}/mlflow/mlflow.db")
    [experiment] = [one for one in client.search_experiments() if one.name != "Default"]
    runs = client.search_runs([experiment.experiment_id])
    found: dict[str, Any] = {"points": [], "samples": {}, "histograms": 0, "reports": []}
    for run in runs:
        for key in run.data.metrics:
            for one in client.get_metric_history(run.info.run_id, key):
                found["points"].append([key, one.step, one.value])
        found |= {
            "name": run.info.run_name,
            "group": run.data.tags.get("group"),
            "status": run.info.status,
            "parameters": dict(run.data.params),
            "project": experiment.name,
        }
        files = run_dir / "mlflow" / "artifacts" / run.info.run_id / "artifacts"
        found["config"] = json.loads((files / "config.json").read_text())
        for one in json.loads(run.data.tags["mlflow.loggedArtifacts"]):
            kind = one["path"].partition("_")[0]
            table = json.loads((files / one["path"]).read_text())
            found["samples"].setdefault(kind, []).extend(table["data"])
        found["histograms"] = len(list(files.glob("*/histograms_*.json")))
        found["reports"] = [path.read_text() for path in files.glob("*.html")]
    return found | {"ids": [run.info.run_id for run in runs]}


def _trackio(run_dir: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(run_dir / "trackio")
    import trackio

    [project] = [path.stem for path in (run_dir / "trackio").glob("*.db")]
    runs = trackio.SQLiteStorage.get_runs(project)
    found: dict[str, Any] = {"points": [], "samples": {}, "histograms": 0, "reports": []}
    for run in runs:
        for row in trackio.SQLiteStorage.get_logs(project, run):
            for key, value in row.items():
                if isinstance(value, dict) and value.get("_type") == "trackio.table":
                    rows = [list(one.values()) for one in value["_value"]]
                    found["samples"].setdefault(key, []).extend(rows)
                elif isinstance(value, dict):
                    found["histograms"] += value.get("_type") == "trackio.histogram"
                elif key not in ("step", "timestamp"):
                    found["points"].append([key, row["step"], float(value)])
        found["config"] = trackio.SQLiteStorage.get_run_config(project, run)
        found |= {"name": run, "group": found["config"].get("_Group"), "project": project}
    found["reports"] = [
        path.read_text() for path in (run_dir / "trackio").rglob("*") if _is_report(path)
    ]
    return found | {"ids": runs}


def _is_report(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith(b"<p>report")


if __name__ == "__main__":
    readers = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
    print(json.dumps({name: readers[name](Path(sys.argv[1])) for name in sys.argv[2:]}))
