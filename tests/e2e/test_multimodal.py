"""GRPO on text with a published folder that has a vision tower: the doctor accepts it, a step trains
its text model, and the export is the folder with other text weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.batch import read_parquet
from hybridflow.cli.main import main
from hybridflow.models.stored_names import tower_part
from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.from_folders import largest_difference, prepared, train
from tests.models import MULTIMODAL
from tests.published.multimodal import (
    NEWER,
    OLDER,
    config_of,
    multimodal_folder,
    read_by_transformers,
    tensors_in,
)

pytestmark = pytest.mark.slow


def walks_through(kind: str, folder: Path, prefix: str | None = None) -> None:
    """One step of GRPO, whose log-probs are those of transformers' multimodal class."""
    source = multimodal_folder(kind, folder / "hf", prefix=prefix, tokenizer=True)
    out = train(prepared(folder), "first", "sft=none", "trainer.total_steps=1")
    assert "GRPO 1/1" in out and f"were copied unchanged from {source}" in out
    run = folder / "runs" / "first"
    assert 0 < json.loads((run / "summary.json").read_text())["logprob_diff_max"] <= 1e-5
    dump = read_parquet(run / "rollouts" / "step_000001.parquet")
    assert largest_difference(read_by_transformers(source), dump) <= 1e-5

    came, went = tensors_in(source), tensors_in(run / "export")
    assert went.keys() == came.keys()
    tower = {name for name in came if tower_part(name)}
    assert tower and all(torch.equal(went[name], came[name]) for name in tower)
    assert any(not torch.equal(went[name], came[name]) for name in came.keys() - tower)
    before, after = config_of(source), config_of(run / "export")
    for name in ("model_type", "architectures", "vision_config"):
        assert after[name] == before[name]
    read_by_transformers(run / "export")

    again = folder / "again"
    assert main(["checkpoint", "export", str(run), str(again)]) == 0
    for file in ("config.json", "checksums.sha256"):  # of the same shards
        assert (again / file).read_text() == (run / "export" / file).read_text()


def test_a_folder_with_stacked_experts(tmp_path: Path) -> None:
    walks_through("qwen3_5_moe", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("prefix", [OLDER, NEWER])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "ministral3"])
def test_both_forms_of_names(kind: str, prefix: str, tmp_path: Path) -> None:
    walks_through(kind, tmp_path, prefix)


@pytest.mark.full
@pytest.mark.parametrize("kind", [*MULTIMODAL, "qwen3_vl_moe"])
def test_every_kind_passes_the_doctor(kind: str, tmp_path: Path) -> None:
    images = kind not in MULTIMODAL
    source = multimodal_folder(kind, tmp_path / "hf", tokenizer=True, images=images)
    assert main(["doctor", "--model", str(source)]) == 0


@pytest.mark.full
def test_the_dense_qwen(tmp_path: Path) -> None:
    walks_through("qwen3_5", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_an_engine_of_its_own_has_only_the_text_model(kind: str, tmp_path: Path) -> None:
    multimodal_folder(kind, tmp_path / "hf", tokenizer=True)
    words = ("cluster=one-process", "rollout.engine=sglang", "sft=none", "trainer.total_steps=2")
    assert "GRPO 2/2" in train(prepared(tmp_path), "first", *words)
    records = read_jsonl(tmp_path / "runs" / "first" / "metrics.jsonl")
    trained = [one for one in records if one["phase"] == "train"]
    assert len(trained) == 2
    assert all(one["rollout/logprob_diff/mean"] < 1e-4 for one in trained)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_peft_loads_an_adapter_on_the_whole_model(kind: str, tmp_path: Path) -> None:
    """The export, and the folder with the exported adapter, are the same model. A tower of Gemma 3
    has linears with the names of adapted ones."""
    from peft import PeftModel

    source = multimodal_folder(kind, tmp_path / "hf", tokenizer=True)
    words = ("sft=none", "trainer.total_steps=2", "actor.lora={rank: 4, alpha: 8.0}")
    train(prepared(tmp_path), "first", *words)
    run = tmp_path / "runs" / "first"
    assert main(["checkpoint", "export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    ids = torch.randint(20, 300, (2, 30), generator=torch.Generator().manual_seed(0))
    base = read_by_transformers(source)
    with torch.no_grad():
        merged = read_by_transformers(run / "export")(ids).logits
        assert (base(ids).logits - merged).abs().max() > 1e-3
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
        assert (adapted(ids).logits - merged).abs().max() < 1e-5
    names = [name for name, _ in adapted.named_parameters() if ".lora_" in name]
    assert len(names) == len(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert all(".language_model.layers." in name for name in names)
