"""Ranks of an engine on two nodes that reach each other over a cable alone, without a route to
anywhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.observe.rollouts import read_rollouts
from tests.dist.harness.two_hosts import ADDRESSES, PORT, may_be_made, ray, two_hosts
from tests.e2e.runs import HYBRIDFLOW, LOOPBACK, Run

pytestmark = [pytest.mark.slow, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
WORDS = (
    *("train", "--config-name", "e2e", "actor=tiny", "rollout=tiny", "rollout.n=2", "sft.steps=0"),
    *(
        "cluster.nodes=2",
        "cluster.procs_per_node=1",
        "actor.parallel.pipeline=2",
        "cluster.trusted_network=true",
    ),
    *("rollout.tensor=2", "rollout.nodes_per_engine=2", f"cluster.address={ADDRESSES[0]}:{PORT}"),
    # other tests may share the machine
    *("cluster.start_timeout_s=600", "rollout.start_timeout_s=600"),
)


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


@pytest.mark.skipif(not may_be_made(), reason="needs root and network namespaces")
def test_a_run_whose_engine_lies_on_two_nodes_with_a_network_of_their_own(tmp_path: Path) -> None:
    words = [*WORDS, f"output_dir={tmp_path}", f"data.prepare.out={tmp_path / 'data'}"]
    with two_hosts() as commands, ray(commands, ADDRESSES, tmp_path) as token:
        hybridflow = [*commands[0], "env", f"RAY_AUTH_TOKEN_PATH={token}", HYBRIDFLOW]
        with Run(tmp_path / "output", *words, command=hybridflow) as run:
            assert run.end(500) == 0, run.out + run.err
            left = run.left_behind()
            listening = run.listening
    assert left == []
    reachable = {address for address, _ in listening if not LOOPBACK.match(address)}
    assert reachable <= set(ADDRESSES), listening
    summary = json.loads((tmp_path / "e2e" / "summary.json").read_text())
    assert summary["layout"].endswith("1×TP2·2 nodes") and summary["logprob_diff_mean"] <= 1e-4
    rows = list(read_rollouts(tmp_path / "e2e" / "rollouts" / "step_000002.parquet"))
    assert {row["weight_version"] for row in rows} == {"1"}
