"""`python -m hybridflow.bench JOB.json`: runs a single entry in this process. Started by
`hybridflow bench run`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.bench import result as results
from hybridflow.bench.measurements.base import Place, find
from hybridflow.bench.result import Metric, NotRun, Result
from hybridflow.errors import HybridFlowError, StorageError


def measure(job: dict[str, Any]) -> Result:
    """Run a job's benchmark entry. Returns its metrics, its findings and the parts that were not
    run.
    """
    place = Place(
        job["node"], tuple(job["nodes"]), Path(job["folder"]), Path(job["local"])
    )
    entry = find(job["name"])
    if entry.per_node and len(place.nodes) > 1:
        place.meet(f"{job['label']}.{job['part']}")
    node = place.node if entry.per_node else ""
    metrics: list[Metric] = []
    not_run: list[NotRun] = []
    findings = []
    recipe = None
    for one in entry.measure(place, job["settings"]):
        if isinstance(one, Metric):
            metrics.append(replace(one, measurement=job["label"], node=node))
        elif isinstance(one, NotRun):
            not_run.append(one)
        elif "recipe" in one:
            recipe = one["recipe"]
        else:
            findings.append({"node": place.node, **one})
    return Result(
        job["label"],
        fingerprint=results.fingerprint_of({}, recipe),
        metrics=tuple(metrics),
        not_run=tuple(not_run),
        findings=tuple(findings),
    )


def main(path: str) -> int:
    """Run the job in the file at `path` and write the result. Returns the exit status."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        results.write(Path(job["out"]), measure(job))
    except HybridFlowError as error:
        print(f"hybridflow: {error}", flush=True)
        return error.exit_code
    except OSError as error:
        print(f"hybridflow: {StorageError.of(error) or error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
