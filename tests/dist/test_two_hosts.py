"""Ranks of an engine on two nodes that reach each other over a cable alone, without a route to anywhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness.two_hosts import ADDRESSES, may_be_made, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not may_be_made(), reason="needs root and network namespaces")
def test_messages_reach_the_ranks_of_another_node_at_the_nodes_address() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "cable0"}
    program = [sys.executable, "-m", "tests.dist.harness.queue_end"]
    with two_hosts() as commands:
        ends = [
            subprocess.Popen(
                [*commands[rank], *program, str(rank), ADDRESSES[rank], f"{ADDRESSES[0]}:29500"],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [json.loads(end.communicate(timeout=200)[0].splitlines()[-1]) for end in ends]
        finally:
            for end in ends:
                end.kill()
                end.wait()
    assert said == [[ADDRESSES[0], "sent"]] * 2
