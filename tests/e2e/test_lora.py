"""A whole run with adapters, without and with those of routed experts: 4 Megatron ranks (TP 2, PP
2, EP 2), SGLang engines, warm start, two GRPO steps, checkpoint, both exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.saving.tools import export, export_adapter, locate
from tests.e2e.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.full]


# of 2 layers at rank 4: qkv 64 -> 128 (4 heads, 2 groups of 16), proj 64 -> 64
ATTENTION = 2 * 4 * ((64 + 128) + (64 + 64))
# fc1 64 -> 128 and fc2 64 -> 64 of 4 experts
ROUTED = 2 * 4 * 4 * ((64 + 128) + (64 + 64))


@pytest.mark.parametrize(
    ("targets", "sync", "numbers", "tensors"),
    [
        ("[]", "merged", ATTENTION, 2 * 4 * 2),
        ("[]", "adapter", ATTENTION, 2 * 4 * 2),
        (
            "[linear_qkv, linear_proj, experts.linear_fc1, experts.linear_fc2]",
            "merged",
            ATTENTION + ROUTED,
            2 * (4 + 4 * 3) * 2,
        ),
    ],
    ids=["attention", "kept", "experts"],
)
def test_adapters_train_and_engines_sample_with_them(
    tmp_path: Path, settings: list[str], targets: str, sync: str, numbers: int, tensors: int
) -> None:
    words = [
        *settings,
        f"output_dir={tmp_path}",
        "actor.lora.rank=4",
        "actor.lora.alpha=8",
        f"actor.lora.targets={targets}",
        f"actor.lora.sync={sync}",
        "rollout.num_engines=1",
    ]
    with Run(tmp_path / "output", "train", *words) as run:
        exit_code = run.end(400)
        left = run.left_behind()
    assert exit_code == 0, run.out + run.err
    assert left == []
    folder = tmp_path / "e2e"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    # the engine samples with merged weights or its own adapters, the trainer scores with its own
    assert 0 < summary["logprob_diff_max"] <= 1e-4
    assert 0 <= summary["first_ppo_kl_max"] <= 1e-6
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = {
        record["actor/trainable_parameters"]
        for record in records
        if "actor/trainable_parameters" in record
    }
    assert trained == {numbers}
    export(locate(folder), tmp_path / "hf", None, 1 << 30, None)
    [one], [two] = (
        [load_file(file) for file in at.glob("*.safetensors")]
        for at in (folder / "export", tmp_path / "hf")
    )
    for name in one.keys() | two.keys():
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-6, msg=name)
    written = export_adapter(locate(folder), tmp_path / "adapter", None)
    factors = load_file(written.folder / "adapter_model.safetensors")
    assert len(factors) == tensors and all(bool(tensor.any()) for tensor in factors.values())
