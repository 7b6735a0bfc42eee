"""A Slurm of our own for the tests of this folder, and what their runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from tests.slurm.cluster import SlurmCluster, missing_programs
from tests.slurm.jobs import Jobs

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Three nodes. Skips where Slurm is not installed; tests/run.py says so in its last line."""
    if missing := missing_programs():
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing)} missing): make setup-slurm installs it"
        )
    with SlurmCluster(["n1", "n2", "n3"]) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    """A test that fails leaves its jobs; they would stand in the way of the next one's."""
    yield
    slurm.cancel_all()


@pytest.fixture(scope="session")
def jobs(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs of the e2e recipe with prepared data, without a warm start."""
    folder: Path = tmp_path_factory.mktemp("slurm")
    (folder / "reward.py").write_text(REWARD)
    prepare("arithmetic", folder / "data", None, load_config("e2e").data.prepare.options)
    settings = [f"data.prepare.out={folder / 'data'}", "reward=custom", "sft=none"]
    return Jobs(slurm, folder, [*settings, f"reward.path={folder / 'reward.py'}"])
