"""A run over two nodes whose network loses, delays and repeats what is sent ends as one over a
network in order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.dist.harness.two_hosts import PORT, ray
from tests.e2e.runs import HYBRIDFLOW, Run
from tests.faults import oracle
from tests.faults.shapes import words_of

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LAYOUT = [
    "cluster.nodes=2",
    "cluster.procs_per_node=1",
    "actor.parallel.pipeline=2",
    "rollout.num_engines=1",
]


@contextmanager
def nodes(*weather: str) -> Iterator[list[list[str]]]:
    """Words that begin a command on each of two nodes; `weather` is what the link between them
    does."""
    command = [sys.executable, str(Path(__file__).with_name("lossy_link.py")), *weather]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as link:
        assert link.stdin is not None and link.stdout is not None
        try:
            yield [
                ["nsenter", "--net", "--target", str(pid)]
                for pid in json.loads(link.stdout.readline())
            ]
        finally:
            link.stdin.close()
            print(link.stdout.read())


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun"
)
def test_what_a_network_loses_delays_and_repeats_changes_no_number(tmp_path: Path) -> None:
    for name, weather in {"in-order": ("0", "0", "0"), "bad": ("0.01", "0.01", "2")}.items():
        out = tmp_path / name / "out"
        words = words_of("one process", tmp_path / "work", out)
        words += [
            *LAYOUT,
            f"cluster.address={ADDRESSES[0]}:{PORT}",
            "cluster.trusted_network=true",
            "trainer.total_steps=3",
        ]
        with nodes(*weather) as commands, ray(commands, ADDRESSES, tmp_path) as token:
            hybridflow = [*commands[0], "env", f"RAY_AUTH_TOKEN_PATH={token}", HYBRIDFLOW]
            with Run(tmp_path / f"{name}-output", *words, command=hybridflow) as run:
                assert run.end(500) == 0, run.out + run.err
                assert run.left_behind() == []
    assert (
        oracle.differences(tmp_path / "bad" / "out" / "e2e", tmp_path / "in-order" / "out" / "e2e")
        == []
    )
