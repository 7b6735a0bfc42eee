"""The page about clusters, walked on a real Slurm of two nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, missing_programs
from tests.slurm.jobs import SITE
from tests.walks.transcript import Walk

pytestmark = pytest.mark.slow


def test_from_an_empty_folder_to_an_exported_model(tmp_path: Path) -> None:
    if missing := missing_programs():
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing)} missing): make setup-slurm installs it"
        )
    site = tmp_path / "site.yaml"  # what an admin has written
    site.write_text(json.dumps(SITE))
    folder = tmp_path / "me"
    folder.mkdir()
    with SlurmCluster(["n1", "n2"]) as cluster:
        kept = {name: value for name, value in cluster.environment.items() if name not in ("PATH",)}
        Walk(folder, {**kept, "HYBRIDFLOW_SITE": str(site), "TMPDIR": "/tmp"}).walk(
            "docs/cluster.md"
        )
