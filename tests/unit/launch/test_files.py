"""The plain files of launch/: scripts, the KubeRay manifest, the image of the gpu lane in its two
forms."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.rglob("*.sh")), ROOT / "requirements" / "slurm.sh"]
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "USER", "CMD"}
SECTIONS = {"files", "post", "environment", "runscript", "test"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_clean(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "set -euo pipefail" in script.read_text()
    if shutil.which("shellcheck") and script.name not in (
        "job.sh",
        "bench.sh",
    ):  # checked with their settings, in test_job.py
        done = subprocess.run(
            ["shellcheck", str(script)], capture_output=True, text=True, check=False
        )
        assert done.stdout == ""


def instructions() -> list[tuple[str, str]]:
    """(instruction, words) of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", (LAUNCH / "containers" / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_is_pinned_copies_what_exists_and_does_not_run_as_root() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS and found[0][0] == "FROM"
    assert re.fullmatch(r"[\w/]+:[\w.-]+", found[0][1]) and not found[0][1].endswith(":latest")
    sources = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert [word for word in sources if not (ROOT / word).exists()] == []
    users = [rest for name, rest in found if name == "USER"]
    assert users and users[-1] not in ("root", "0")
    runs = " ".join(rest for name, rest in found if name == "RUN")
    assert "sudo" not in runs and "dnf clean all" in runs and "LANE=gpu" in runs
    assert "-devel-" in found[0][1] and ENGINE_BUILT in runs, "Transformer Engine needs nvcc"


def sections() -> dict[str, str]:
    """The sections of the apptainer definition by name, and its header under an empty name."""
    parts = re.split(
        r"^%(\w+)\n", (LAUNCH / "containers" / "hybridflow.def").read_text(), flags=re.MULTILINE
    )
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_the_apptainer_definition_is_the_same_image() -> None:
    found = sections()
    assert set(found) - {""} == SECTIONS
    header = dict(
        line.split(": ")
        for line in found[""].splitlines()
        if not line.startswith("#") and ": " in line
    )
    assert header == {"Bootstrap": "docker", "From": instructions()[0][1]}
    pairs = [line.split() for line in found["files"].splitlines() if line.strip()]
    assert all(
        (ROOT / source).exists() and target == f"/hybridflow/{source}" for source, target in pairs
    )
    assert (
        subprocess.run(["bash", "-n"], input=found["post"], text=True, check=False).returncode == 0
    )
    docker = " ".join(rest for _, rest in instructions())
    for text in (docker, found["post"].replace("\\\n", " ")):
        packages = text.split("setopt=install_weak_deps=False")[1].split("dnf clean")[0].split()
        assert [word for word in packages if word != "&&"] == PACKAGES
        assert ENGINE_BUILT in text


ENGINE_BUILT = "test -f .venv/.hybridflow-setup-engine"
PACKAGES = shlex.split(
    "python3.12 python3.12-devel python3.12-pip gcc-c++ git make ninja-build numactl-libs "
    "libibverbs librdmacm iproute procps-ng"
)


def test_the_kuberay_manifest_is_a_job_whose_parts_fit_together() -> None:
    manifest: dict[str, Any] = yaml.safe_load((LAUNCH / "ray" / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    cluster = manifest["spec"]["rayClusterSpec"]
    locked = re.search(
        r"^ray==(\S+)$", (ROOT / "requirements" / "gpu.txt").read_text(), flags=re.MULTILINE
    )
    assert locked and cluster["rayVersion"] == locked[1]
    pods = [
        cluster["headGroupSpec"]["template"],
        *(group["template"] for group in cluster["workerGroupSpecs"]),
    ]
    for pod in [*pods, spec["submitterPodTemplate"]]:
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            environment = {entry["name"]: entry for entry in container["env"]}
            assert environment["RAY_AUTH_MODE"]["value"] == "token"
            # not in the manifest itself
            assert "secretKeyRef" in environment["RAY_AUTH_TOKEN"]["valueFrom"]
    nodes = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    words = dict(word.split("=", 1) for word in spec["entrypoint"].split() if "=" in word)
    assert words["cluster.nodes"] == str(nodes) and words["cluster.address"] == "auto"
    gpus = pods[0]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert words["cluster.procs_per_node"] == gpus


def test_the_hand_made_cluster_refuses_without_a_token(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(LAUNCH / "ray" / "cluster.sh"), "head", "10.0.0.1"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "is missing or empty" in done.stderr


@pytest.mark.slow
def test_the_hand_made_cluster_alone_is_stopped(tmp_path: Path) -> None:
    """Other clusters of the same user on this machine, and the programs that use this one, go
    on."""
    port = f"77{os.getpid()}"  # no real port, so that nothing else is meant
    of_it = (
        f"--gcs_server_port={port}",
        f"--gcs-address=10.0.0.1:{port}",
        f"--address=10.0.0.1:{port}",
    )
    others = (
        f"--gcs_server_port={port}1",
        f"--gcs-address=10.0.0.1:1{port}",
        f"cluster.address=10.0.0.1:{port}",
    )
    sleeps = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
    started = [
        subprocess.Popen([*sleeps, "before", word, "after"], stdout=subprocess.PIPE)
        for word in (*of_it, *others)
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        stop = ["bash", str(LAUNCH / "ray" / "cluster.sh"), "stop"]
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "FIRST_PORT": port}
        # a process that has ended stays in the list until its parent asks how
        reaper = threading.Thread(
            target=lambda: [process.wait() for process in started[: len(of_it)]], daemon=True
        )
        reaper.start()
        assert subprocess.run(stop, env=environment, check=False, timeout=60).returncode == 0
        reaper.join(60)
        assert [process.poll() is None for process in started] == [False] * len(of_it) + [
            True
        ] * len(others)
        assert subprocess.run(stop, env=environment, check=False, timeout=60).returncode == 0
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_stopped_cluster_leaves_no_folder_however_busy_the_temporary_one_is(
    tmp_path: Path,
) -> None:
    """`find` fails where a folder is removed while it reads."""
    port = f"78{os.getpid()}"
    stop = ["bash", str(LAUNCH / "ray" / "cluster.sh"), "stop"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "FIRST_PORT": port,
    }
    other = tmp_path / f"hf-cluster-{port}1-x"
    other.mkdir()
    busy = [
        sys.executable,
        "-c",
        "import os\nprint(flush=True)\nnames = [f'tmp{i}' for i in range(1500)]\n"
        "while True:\n    [*map(os.mkdir, names)]\n    [*map(os.rmdir, names)]\n",
    ]
    with subprocess.Popen(busy, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            for _ in range(10):
                folder = tmp_path / f"hf-cluster-{port}-a b"
                (folder / "session").mkdir(parents=True)
                assert (
                    subprocess.run(stop, env=environment, check=False, timeout=60).returncode == 0
                )
                assert not folder.exists() and other.exists()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("program", "drained"), [("exit 0", ""), ("echo the disk is full; exit 1", "the disk is full")]
)
def test_the_prolog_drains_a_node_that_is_not_in_order(
    tmp_path: Path, program: str, drained: str
) -> None:
    for name, text in (("python", program), ("scontrol", f'echo "$@" > {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "SLURMD_NODENAME": "n7",
    }
    script = ROOT / "launch" / "slurm" / "prolog.sh"
    subprocess.run(
        ["bash", str(script)], env=environment, check=True, timeout=60, capture_output=True
    )
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == (
        f"update NodeName=n7 State=DRAIN Reason=hybridflow: {drained}\n" if drained else ""
    )
