"""`python -m hybridflow.bench NAME ...`: one measurement in this process; `hybridflow bench run` starts it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from hybridflow.bench import result as results
from hybridflow.bench.measurements.base import MEASUREMENTS, Place
from hybridflow.bench.result import Metric, NotRun, Result
from hybridflow.errors import HybridFlowError, StorageError


def main(words: list[str]) -> int:
    """Measure, and write the metrics as a result; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hybridflow.bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local", type=Path, required=True)
    parser.add_argument("--node", default="")
    parser.add_argument("--part", default="0", help="number of this process among those that take the measurement")
    parser.add_argument("--nodes", nargs="+", default=[""])
    given = parser.parse_args(words)
    place = Place(given.node, tuple(given.nodes), given.folder, given.local)
    try:
        entry = MEASUREMENTS.get(given.name)
        if entry.per_node and len(place.nodes) > 1:
            place.meet(f"{Path(given.name).name}.{given.part}")
        found = list(entry.run(place))
        metrics = tuple(
            replace(one, node=place.node if entry.per_node else "") for one in found if isinstance(one, Metric)
        )
        findings = tuple({"node": place.node, **one} for one in found if isinstance(one, dict) and "level" in one)
        not_run = tuple(one for one in found if isinstance(one, NotRun))
        recipe = next((one["recipe"] for one in found if isinstance(one, dict) and "recipe" in one), None)
        blank = Result(Path(given.name).name, "", 0.0, results.fingerprint_of({}, recipe))
        results.write(given.out, replace(blank, metrics=metrics, not_run=not_run, findings=findings))
    except HybridFlowError as error:
        print(f"hybridflow: {error}", flush=True)
        return error.exit_code
    except OSError as error:
        print(f"hybridflow: {StorageError.of(error) or error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
