"""A whole run with vLLM as the engine, where `HYBRIDFLOW_VLLM_PYTHON` names an interpreter that has
it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.runs import Run

PYTHON = os.environ.get("HYBRIDFLOW_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(
        not PYTHON, reason="HYBRIDFLOW_VLLM_PYTHON names no interpreter that has vLLM"
    ),
]


def test_the_policy_trains_on_what_vllm_samples(tmp_path: Path, settings: list[str]) -> None:
    words = [
        *settings,
        f"output_dir={tmp_path}",
        "model=tiny-dense",
        "~model.hf_config.moe_intermediate_size",
        "model.hf_config.head_dim=32",  # vLLM's attention on CPUs takes no narrower heads
        "actor=tiny",
        "actor.backend=fsdp",
        "actor.ppo_mini_batch_size=2",
        "cluster.procs_per_node=2",
        "rollout.num_engines=1",
        "rollout.engine=vllm",
        f"rollout.python={PYTHON}",
    ]
    with Run(tmp_path / "output", "train", *words) as run:
        exit_code = run.end(400)
        left = run.left_behind()
    assert exit_code == 0, run.out + run.err
    assert left == []
    summary = json.loads((tmp_path / "e2e" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert 0 < summary["logprob_diff_max"] <= 1e-4
