"""A run whose engines and trainer take turns on the same devices, and whose weights travel in
memory that both map: on a CPU what `cuda_ipc` is on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_two_steps_rotated_over_shared_memory(tmp_path: Path, settings: list[str]) -> None:
    words = [
        "actor.offload={weights: true, gradients: true, optimizer: true}",
        "rollout.sleep_while_training=true",
        "rollout.pool=actor",
        "rollout.sync.transport=shared_memory",
        "rollout.sync.commit=in_place",
        "trainer.total_steps=2",
        "trainer.report=false",
        "trainer.export=false",
        f"output_dir={tmp_path / 'output'}",
    ]
    with Run(tmp_path, "train", *settings, *words) as run:
        assert run.end(500) == 0, run.out + run.err
    steps = [
        record
        for record in read_jsonl(tmp_path / "output" / "e2e" / "metrics.jsonl")
        if record["phase"] == "train"
    ]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["actor/grad_norm"] > 1e-3
        # an engine that slept through a step answers with the weights of the last update, to the
        # rounding of fp32
        assert 0 < record["rollout/logprob_diff/mean"] <= 1e-4
