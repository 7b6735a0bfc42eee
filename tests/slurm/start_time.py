"""How much later the first training step comes in a Slurm job over two nodes than by hand, on this
machine.

    python -m tests.slurm.start_time

Both runs have the same recipe and settings. Prints when each stage was reached, in seconds after
the command was given.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import HYBRIDFLOW, TWO_NODES, Jobs

_TIMEOUT_S = 600.0


def by_hand(jobs: Jobs) -> dict[str, float]:
    """`hybridflow train`, which starts a Ray of its own, where both ranks are processes of one
    node."""
    begun = time.monotonic()
    shape = [word for word in TWO_NODES if not word.startswith("cluster.nodes=")]
    shape[shape.index("cluster.procs_per_node=1")] = "cluster.procs_per_node=2"
    words = ["--config-name", "e2e", *jobs.settings, *shape, "name=by hand"]
    log = jobs.folder / "by hand.log"
    with log.open("wb") as file:
        run = subprocess.Popen(
            [*HYBRIDFLOW, "train", *words],
            cwd=jobs.folder,
            env=jobs.environment,
            stdout=file,
            stderr=file,
        )
    try:
        reached = _reached(
            begun, {"first step": lambda: bool(jobs.steps("by hand"))}, lambda: run.poll() is None
        )
        assert run.wait(_TIMEOUT_S) == 0, log.read_text()
    finally:
        run.kill()
        run.wait()
    return reached


def as_job(jobs: Jobs) -> dict[str, float]:
    """`hybridflow slurm submit`."""
    begun = time.monotonic()
    job = jobs.submit("as a job", "--config-name", "e2e")
    submitted = time.monotonic() - begun
    folder = jobs.start_folder(job)
    stages: dict[str, Callable[[], bool]] = {
        "the script runs": (folder / "token").exists,
        "preflight is over": (folder / "nodes.txt").exists,
        "all nodes have joined Ray": (folder / "driver.log").exists,
        "first step": lambda: bool(jobs.steps("as a job")),
    }
    reached = _reached(begun, stages, lambda: True)
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    return {"submitted": submitted, **reached}


def _reached(
    begun: float, stages: dict[str, Callable[[], bool]], going: Callable[[], bool]
) -> dict[str, float]:
    """When each stage was reached, in seconds after `begun`; the last one ends the wait, as does
    the run's end."""
    found: dict[str, float] = {}
    while list(stages)[-1] not in found and going() and time.monotonic() < begun + _TIMEOUT_S:
        found |= {
            name: time.monotonic() - begun
            for name, holds in stages.items()
            if name not in found and holds()
        }
        time.sleep(0.1)
    return found


def main() -> None:
    """Measure both, by hand first, and print them."""
    with tempfile.TemporaryDirectory() as name, SlurmCluster(["n1", "n2"]) as cluster:
        folder = Path(name)
        prepare("arithmetic", folder / "data", None, load_config("e2e").data.prepare.options)
        jobs = Jobs(cluster, folder, [f"data.prepare.out={folder / 'data'}", "sft=none"])
        hand = by_hand(jobs)
        job = as_job(jobs)
    for title, reached in (("by hand", hand), ("as a job", job)):
        for stage, seconds in reached.items():
            print(f"{title:<10}{stage:<28}{seconds:>7.1f} s")
    print(f"{'beyond':<10}{'first step':<28}{job['first step'] - hand['first step']:>7.1f} s")


if __name__ == "__main__":
    main()
