"""Bandwidth between nodes: who meets whom, and which node is named when a link is slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.bench.files import RESULT
from hybridflow.bench.gate import outliers
from hybridflow.bench.measurements.fabric import PAIRS, partners
from hybridflow.bench.result import read

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
# Python itself loads this file in the process of the slow node.
SLOW = """
import time
import torch.distributed as dist

_exchange = dist.batch_isend_irecv


def slow(sides):
    time.sleep(0.1)
    return _exchange(sides)


dist.batch_isend_irecv = slow
"""


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 33])
def test_any_two_nodes_meet_once(count: int) -> None:
    met = set()
    for pairs in partners(count):
        assert [pairs[pairs[one]] for one in range(count)] == list(range(count))
        met |= {(one, other) for one, other in enumerate(pairs) if one < other}
    assert len(met) == count * (count - 1) // 2
    for one in range(count):
        met_first = {pairs[one] for pairs in partners(count)[:PAIRS]} - {one}
        assert len(met_first) >= min(PAIRS - 1, count - 1)


@pytest.mark.slow
def test_the_node_with_the_slow_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    command = [sys.executable, "-P", "-m", "hybridflow.cli.main", "bench", "run", "fabric"]
    command += ["backend=gloo", "--out", str(tmp_path / "out")]
    running = []
    for node in NODES:
        path = [str(tmp_path)] if node == NODES[1] else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *sys.path])}
        words = [*command, "--node", node, "--nodes", *NODES]
        running.append(
            subprocess.Popen(
                words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    for process in running:
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 0 and "fabric: 1 metrics" in out, out
    found = [read(tmp_path / "out" / "nodes" / f"{node}.json") for node in NODES]
    whole = found[0].joined(found[1:])
    assert {one.node for one in outliers(whole)} == {NODES[1]}
    assert [one.name for one in whole.metrics] == ["fabric/CPU"] * len(NODES)
    # the secret of the world is gone
    assert not list((tmp_path / "out" / "fabric").iterdir())


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "hybridflow.cli.main", "bench", "run", "fabric"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env={**environment, "HYBRIDFLOW_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1 and "it needs a GPU" in done.stdout, done.stdout + done.stderr
    assert [one.why for one in read(tmp_path / RESULT).not_run] == ["it needs a GPU"]
