"""A run over two nodes whose network loses, delays and repeats what is sent ends as one over a network in order."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.runs import HYBRIDFLOW, Run
from tests.faults import oracle
from tests.faults.shapes import words_of

ROOT = Path(__file__).resolve().parents[2]
HEAD, PORT = "10.77.0.1", 20000
LAYOUT = ["cluster.nodes=2", "cluster.procs_per_node=1", "actor.parallel.pipeline=2", "rollout.num_engines=1"]


@contextmanager
def nodes(*weather: str) -> Iterator[list[list[str]]]:
    """Words that begin a command on each of two nodes; `weather` is what the link between them does."""
    command = [sys.executable, str(Path(__file__).with_name("lossy_link.py")), *weather]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as link:
        assert link.stdin is not None and link.stdout is not None
        try:
            yield [["nsenter", "--net", "--target", str(pid)] for pid in json.loads(link.stdout.readline())]
        finally:
            link.stdin.close()
            print(link.stdout.read())


@contextmanager
def ray(commands: list[list[str]], token: Path) -> Iterator[None]:
    """Ray by hand on both nodes."""
    script = ["bash", str(ROOT / "launch" / "ray" / "cluster.sh")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # a cluster that an earlier test of this process has had leaves settings for one machine behind
    rest = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = {**rest, "RAY_AUTH_TOKEN_PATH": str(token), "PATH": path, "FIRST_PORT": str(PORT)}

    def run(node: int, *words: str) -> None:
        done = subprocess.run(
            [*commands[node], *script, *words], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run(0, "head", HEAD)
        run(1, "join", HEAD, "10.77.0.2")
        yield
    finally:
        run(0, "stop")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun")
def test_what_a_network_loses_delays_and_repeats_changes_no_number(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    for name, weather in {"in-order": ("0", "0", "0"), "bad": ("0.01", "0.01", "2")}.items():
        out = tmp_path / name / "out"
        words = words_of("one process", tmp_path / "work", out)
        words += [*LAYOUT, f"cluster.address={HEAD}:{PORT}", "cluster.trusted_network=true", "trainer.total_steps=3"]
        with nodes(*weather) as commands, ray(commands, token):
            hybridflow = [*commands[0], "env", f"RAY_AUTH_TOKEN_PATH={token}", HYBRIDFLOW]
            with Run(tmp_path / f"{name}-output", *words, command=hybridflow) as run:
                assert run.end(500) == 0, run.out + run.err
                assert run.left_behind() == []
    assert oracle.differences(tmp_path / "bad" / "out" / "e2e", tmp_path / "in-order" / "out" / "e2e") == []
