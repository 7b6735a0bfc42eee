"""Whole runs whose engine has a shape of its own: over two nodes (here one machine, as in a local
cluster), and a pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import LOOPBACK, Run

pytestmark = [pytest.mark.slow, pytest.mark.full]
SHAPES = {
    "two nodes": (("rollout.tensor=2", "rollout.nodes_per_engine=2"), "1×TP2·2 nodes"),
    "pipeline": (("rollout.pipeline=2", "rollout.sync.pause=abort"), "1×TP1·PP2"),
    "data-parallel attention": (
        ("rollout.tensor=2", "rollout.data_parallel_attention=2", "rollout.expert=2"),
        "1×TP2·EP2·DPA2",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_with_such_an_engine(tmp_path: Path, settings: list[str], name: str) -> None:
    shape, shown = SHAPES[name]
    words = [
        *settings,
        "actor=tiny",
        "cluster=one-process",
        "rollout=tiny",
        f"output_dir={tmp_path}",
        "rollout.n=2",
        "sft.steps=0",
    ]
    with Run(tmp_path / "output", "train", *words, *shape) as run:
        assert run.end(400) == 0, run.out + run.err
        left = run.left_behind()
        listening = run.listening
    assert left == []
    assert [address for address, _ in listening if not LOOPBACK.match(address)] == []
    summary = json.loads((tmp_path / "e2e" / "summary.json").read_text())
    assert summary["layout"].endswith(shown) and summary["logprob_diff_mean"] <= 1e-4
    for step in range(1, summary["steps"] + 1):
        rows = list(read_rollouts(tmp_path / "e2e" / "rollouts" / f"step_{step:06d}.parquet"))
        assert {row["weight_version"] for row in rows} == {str(step - 1)}
