"""A whole run on the second backend: 2 FSDP2 ranks, one SGLang engine, warm start, two GRPO steps,
checkpoint, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.saving.tools import export, locate
from tests.e2e.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.full]


DENSE = ("model=tiny-dense", "~model.hf_config.moe_intermediate_size")


@pytest.mark.parametrize("model", [DENSE, ("actor.recompute=full",)], ids=["dense", "mixture"])
def test_a_model_trains_on_fsdp(tmp_path: Path, settings: list[str], model: list[str]) -> None:
    words = [
        *settings, f"output_dir={tmp_path}", "actor=tiny", "actor.backend=fsdp", *model,
        "actor.ppo_mini_batch_size=2", "cluster.procs_per_node=2", "rollout.num_engines=1",
    ]  # fmt: skip
    with Run(tmp_path / "output", "train", *words) as run:
        exit_code = run.end(400)
        left = run.left_behind()
    assert exit_code == 0, run.out + run.err
    assert left == []
    folder = tmp_path / "e2e"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["layout"].startswith("FSDP2 ")
    assert summary["steps"] == 2
    # the engines sample with the weights that are trained: what they got came from row shards
    assert 0 < summary["logprob_diff_max"] <= 1e-4
    assert 0 <= summary["first_ppo_kl_max"] <= 1e-6
    export(locate(folder), tmp_path / "hf", None, 1 << 30, None)
    [one], [two] = (
        [load_file(file) for file in at.glob("*.safetensors")]
        for at in (folder / "export", tmp_path / "hf")
    )
    assert all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())
