"""Nothing that a run puts into places of all users is open to them, however its Ray was started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.security.inventory import edges_of, open_to_others

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "ray" / "cluster.sh"


def _free_block(count: int) -> int:
    """The first of `count` free ports in a row, below the ephemeral ones."""
    for first in range(23000 + os.getpid() % 500 * 10, 32000, 10):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@contextmanager
def made_by_hand(folder: Path) -> Iterator[tuple[str, list[psutil.Process]]]:
    """The address and processes of a head that cluster.sh has started on loopback."""
    first = str(_free_block(9))
    (folder / "token").touch(0o600)
    (folder / "token").write_text("0" * 64)
    rest = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**rest, "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "PATH": path, "FIRST_PORT": first, "HOME": str(folder)}
    env |= {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}

    def run(*words: str) -> None:
        done = subprocess.run(
            ["bash", str(SCRIPT), *words], env=env, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run("head", "127.0.0.1")
        yield f"127.0.0.1:{first}", [one for one in psutil.process_iter() if _names(one, first)]
    finally:
        run("stop")
    assert not list(Path("/tmp").glob(f"hf-cluster-{first}-*"))


def _names(process: psutil.Process, first: str) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return f"hf-cluster-{first}-" in words or f"127.0.0.1:{first}" in words or f"port={first}" in words


@pytest.mark.slow
def test_a_cluster_made_by_hand_is_closed_to_others(tmp_path: Path) -> None:
    with made_by_hand(tmp_path) as (_, processes):
        deadline = time.monotonic() + 60
        edges = edges_of(processes)
        while not any(edge.kind == "unix socket" for edge in edges):
            assert time.monotonic() < deadline, edges
            time.sleep(0.5)
            edges = edges_of(processes)
        assert open_to_others(edges) == []
        assert any("/hf-cluster-" in edge.name and edge.kind == "folder" for edge in edges)
