"""Nothing of a run is open to other users of its machine, and docs/security.md says what it has.
The runs that take longer are looked at in test_intruder.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.security import launchers, page
from tests.security.inventory import Edge, rows, take

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_run_is_closed_to_others_and_described() -> None:
    with page.RUNS["local"]() as live:
        taken = take(live.processes(), live.run_folders)
    page.show("local", taken)
    assert taken.faults == ()
    kinds = {edge.kind for edge in taken.edges}
    # something was looked at
    assert {"folder", "file", "lock", "unix socket", "tcp", "credential"} <= kinds
    assert page.described("local") == rows(taken.edges), (
        "python -m tests.security.page writes the table again"
    )


@pytest.mark.slow
@pytest.mark.full
def test_a_cluster_made_by_hand_is_closed_to_others() -> None:
    with launchers.shared_folder() as shared, launchers.by_hand(shared) as (_, _, processes):
        deadline = time.monotonic() + 60
        taken = take(processes(), [shared])
        while not any(edge.kind == "unix socket" for edge in taken.edges):
            assert time.monotonic() < deadline, taken
            time.sleep(0.5)
            taken = take(processes(), [shared])
    assert taken.faults == ()
    assert any("/hf-cluster-" in edge.name and edge.kind == "folder" for edge in taken.edges)
    assert {edge.name.rpartition(":")[0] for edge in taken.edges if edge.kind == "tcp"} <= {
        "127.0.0.1",
        "::ffff:127.0.0.1",
    }


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make the namespaces of a pod")
def test_what_a_pod_of_the_manifest_starts_answers_nobody_without_the_token() -> None:
    """The folders of a pod are its own: the manifest mounts what leaves it, and Ray writes to none
    of that."""
    with launchers.shared_folder() as shared, launchers.pod(shared) as process:
        [first] = [
            int(word)
            for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        enter = ["nsenter", f"--target={first}", "--mount", "--net", "--pid", f"--wd={ROOT}", "--"]
        words = [*enter, sys.executable, "-m", "tests.security.inventory", "1", "--json"]
        asked = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert asked.stdout, asked.stderr
        found = json.loads(asked.stdout)
    edges = [Edge(**edge) for edge in found["edges"]]
    own = [fault for fault in found["faults"] if " /tmp/ray" in fault]
    assert [fault for fault in found["faults"] if fault not in own] == []
    listening = {edge.name.rpartition(":")[0]: edge.others for edge in edges if edge.kind == "tcp"}
    assert len(edges) > 20 and any("UNAUTHENTICATED" in said for said in listening.values())
    pod = launchers.pod_of_head()["template"]["spec"]
    mounted = {
        mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]
    }
    assert mounted == {"/shared", "/dev/shm"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
    assert not any("hostPath" in volume for volume in pod["volumes"])
