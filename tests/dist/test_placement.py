"""Processes of a real Ray cluster of several nodes, whose GPUs are names alone, sit where the map
says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = {"devices_per_node": 8, "start_timeout_s": 240}
# Qwen3-30B-A3B over 4 nodes of 8 GPUs: 32 ranks, 16 engines of tensor size 2 on their devices
COLOCATED = {
    "cluster": {**CLUSTER, "nodes": 4, "procs_per_node": 8},
    "rollout": {"num_engines": 16, "tensor": 2, "pool": "actor"},
}
SMALL = {
    "cluster": {**CLUSTER, "nodes": 2, "procs_per_node": 2},
    "rollout": {"num_engines": 2, "tensor": 2},
}


def world(
    head: str, recipe: dict[str, Any], folder: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "tests.dist.harness.placed_world",
        head,
        json.dumps(recipe),
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment, check=False
    )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "recipe", "processes"),
    [("cpu", COLOCATED, 48), ("gpu", SMALL, 6)],
    ids=["32 ranks, 16 engines, a head without GPUs", "apart"],
)
def test_every_process_is_where_the_map_says(
    tmp_path: Path, head: str, recipe: dict[str, Any], processes: int
) -> None:
    done = world(head, recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert (found["kind"], found["processes"], found["reached"]) == ("cuda", processes, True)


@pytest.mark.full
@pytest.mark.slow
def test_a_setting_of_ray_that_undoes_the_lists_is_refused(tmp_path: Path) -> None:
    done = world("gpu", SMALL, tmp_path, RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1")
    assert done.returncode != 0
    assert (
        "runs Ray with RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, which would put several ranks"
        in done.stderr
    )
