"""A suite as a job: every node measures at the same time, and the report names the node that is
slow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import Jobs
from tests.unit.launch.gpus import FAULTS, Machine

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.full]

# Node n2 is slow: Python itself loads this file in every process, and no code of ours knows it.
SLOW = {
    "disk/write": """
import os
if os.environ.get("SLURMD_NODENAME") == "n2":
    import time
    _fsync = os.fsync
    def slow(descriptor):
        _fsync(descriptor)
        time.sleep(1.0)
    os.fsync = slow
""",
    "links/to neighbour": """
import os
if os.environ.get("SLURMD_NODENAME") == "n2":
    import socket
    import time
    class Slow(socket.socket):
        def sendall(self, data, *flags):
            if self.getpeername()[0] != self.getsockname()[0] or len(data) > 1 << 19:
                time.sleep(0.02)
            return super().sendall(data, *flags)
    socket.socket = Slow
""",
}


def reason(slurm: SlurmCluster, node: str) -> tuple[str, str]:
    """State of a node, and why it is drained."""
    said = slurm.look("scontrol", "show", "node", node, "--oneliner")
    state = re.search(r"State=(\S+)", said)
    why = re.search(r"Reason=(.*?) \[", said)
    return state[1] if state else "", why[1] if why else ""


@pytest.mark.parametrize("what", SLOW)
def test_a_suite_runs_as_a_job_and_names_and_drains_the_slow_node(
    slurm: SlurmCluster, tmp_path: Path, what: str
) -> None:
    jobs = Jobs(slurm, tmp_path, [])
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW[what])
    jobs.environment["PYTHONPATH"] = f"{tmp_path / 'slow'}:{jobs.environment['PYTHONPATH']}"
    said = jobs.run("submit", "--bench", "preflight", "--nodes", "3", "--drain")
    job = said.split("submitted job ")[1].split(":")[0]
    path = jobs.folder / "runs" / "bench" / "slurm"
    try:
        state = jobs.end(job)
        output = (path / f"{job}.out").read_text()
        assert sorted(file.stem for file in (path / job / "nodes").glob("*.json")) == [
            "n1",
            "n2",
            "n3",
        ], output
        assert re.search(rf"node n2 stands out: (local )?{what}", output) and state == "FAILED"
        assert "node n2 stands out" in (path / job / "report.html").read_text()
        # on a busy machine another one may stand out too: what is named is drained
        named = set(re.findall(r"(?m)^node (\S+) stands out: ", output))
        assert set(re.findall(r"(?m)^drained (\S+)$", output)) == named
        state, why = reason(slurm, "n2")
        assert "DRAIN" in state and why.startswith("hybridflow: ") and " worse than " in why
        assert {n for n in ("n1", "n2", "n3") if "DRAIN" in reason(slurm, n)[0]} == named
        found = json.loads((path / job / "nodes" / "n2.json").read_text())
        assert found["fingerprint"]["placement"]["nodes"] == ["n1", "n2", "n3"]
        assert {"links/to neighbour 1", "links/to neighbour 2"} <= {
            metric["name"] for metric in found["metrics"]
        }
    finally:
        for node in ("n1", "n2", "n3"):
            if "DRAIN" in reason(slurm, node)[0]:
                slurm.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")


@pytest.mark.parametrize("fault", ["an uncorrectable error", "throttled by heat"])
def test_the_prolog_drains_a_node_with_a_bad_gpu(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = Machine(tmp_path)
    before, after, what = FAULTS[fault]
    machine.gpus[1] = machine.gpus[1].replace(before, after)
    assert len(machine.problems()) == 1  # the programs are in place
    environment = {
        **slurm.environment,
        "PATH": f"{tmp_path}:{slurm.environment['PATH']}",
        "PYTHON": sys.executable,
        "SLURMD_NODENAME": "n2",
        "MIN_FREE_GIB": "0",
    }
    script = ROOT / "launch" / "slurm" / "prolog.sh"
    try:
        subprocess.run(["bash", str(script)], env=environment, check=True, timeout=60)
        state, why = reason(slurm, "n2")
        assert "DRAIN" in state and why.startswith("hybridflow: GPU 1 (") and what[:40] in why
        assert "DRAIN" not in reason(slurm, "n1")[0]
    finally:
        slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
