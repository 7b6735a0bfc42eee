"""Each family's folder, as it was published: checked, loaded, trained by SFT and RL, exported, read
by transformers, whose log-probs are the trainer's. No code of the folder is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.batch import read_parquet
from hybridflow.cli.main import main
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.models.family import family_of
from hybridflow.models.weights import SafetensorsFolder, initial_weights
from tests.e2e.from_folders import largest_difference, prepared, train
from tests.models import FAMILIES as MODELS
from tests.published.folders import FAMILIES, code_ran, published_folder
from tests.published.tokenizers import write_tekken

pytestmark = pytest.mark.slow


def read_by_transformers(folder: Path) -> tuple[Any, set[str]]:
    """(the model, tensors of the folder that it left)."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = json.loads((folder / "config.json").read_text())
    # of layers that transformers does not have; it would ask for accelerate
    config.pop("quantization_config", None)
    # unknown to transformers
    kind = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    settings = CONFIG_MAPPING[kind].from_dict({**config, "model_type": kind})
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=settings, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    return model.eval(), set(info["unexpected_keys"])


def walks_through(family: str, folder: Path, **config: Any) -> None:
    """Train, export, read the export by transformers, and begin another run from it."""
    source = published_folder(family, folder / "hf", **config)
    out = train(prepared(folder), "first", "trainer.total_steps=2")
    assert "SFT 2/2" in out and "GRPO 2/2" in out
    summary = json.loads((folder / "runs" / "first" / "summary.json").read_text())
    assert summary["steps"] == 2 and 0 < summary["logprob_diff_max"] <= 1e-5
    export = folder / "runs" / "first" / "export"
    heads = json.loads((source / "config.json").read_text()).get("num_nextn_predict_layers", 0)
    assert (
        json.loads((export / "config.json").read_text()).get("num_nextn_predict_layers", 0) == heads
    )
    assert (f"that training does not use were copied unchanged from {source}" in out) == bool(heads)
    model, left = read_by_transformers(export)
    assert all(name.startswith("model.layers.2.") for name in left) and bool(left) == bool(heads)
    assert (
        main(["checkpoint", "export", str(folder / "runs" / "first"), str(folder / "again")]) == 0
    )
    for file in ("config.json", "checksums.sha256"):  # of the same shards
        assert (folder / "again" / file).read_text() == (export / file).read_text()
    train(
        folder,
        "second",
        f"model.path={export}",
        "sft=none",
        "trainer.total_steps=1",
        "trainer.export=false",
    )
    dump = read_parquet(folder / "runs" / "second" / "rollouts" / "step_000001.parquet")
    assert largest_difference(model, dump) <= 1e-5
    assert not code_ran(folder)


def test_a_folder_with_every_peculiarity(tmp_path: Path) -> None:
    """Kimi-K2 (its tokenizer, its model_type, fp8 with scales) with a layer for multi-token
    prediction."""
    walks_through("kimi-k2", tmp_path, num_nextn_predict_layers=1)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_folder(family: str, tmp_path: Path) -> None:
    walks_through(family, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("family", ["glm-4.5", "kimi-k2"])
def test_the_heads_of_a_folder_are_trained_and_exported(family: str, tmp_path: Path) -> None:
    """Also from fp8 with scales (Kimi-K2); the export is a folder with heads for the next run."""
    config = {"num_nextn_predict_layers": 1}
    source = published_folder(family, tmp_path / "hf", **config)
    words = ("actor.mtp.train=true", "trainer.total_steps=2")
    assert "GRPO 2/2" in train(prepared(tmp_path), "first", *words)
    run = tmp_path / "runs" / "first"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [one for one in records if one["phase"] in ("sft", "train")]
    assert [one["phase"] for one in trained] == ["sft", "sft", "train", "train"]
    assert all(one["actor/mtp/loss"] > 0 and one["actor/mtp/grad_norm"] > 0 for one in trained)
    assert all(0 <= one["actor/mtp/accuracy"] <= 1 for one in trained)
    before, after = SafetensorsFolder(source), SafetensorsFolder(run / "export")
    assert before.names() == after.names()
    heads = sorted(name for name in after.names() if name.startswith("model.layers.2."))
    assert any(name.endswith("eh_proj.weight") for name in heads)
    changes: dict[str, set[bool]] = {}  # of every tensor, or of all of an expert
    for name in heads:
        shape = after.form(name)[0]
        start = (0,) * len(shape)
        is_same = torch.equal(before.read(name, start, shape), after.read(name, start, shape))
        one = name.rsplit(".", 2)[0] if ".experts." in name else name
        changes.setdefault(one, set()).add(not is_same)
    # the router may have left out some experts, but not all; an expert is trained as a whole
    experts = [changes.pop(one) for one in [*changes] if ".experts." in one]
    assert len(experts) > 1 and {True} in experts
    assert all(len(of_expert) == 1 for of_expert in experts)
    for name, found in changes.items():
        assert found == {not name.endswith("e_score_correction_bias")}, name
    words = (f"model.path={run / 'export'}", "sft=none", "trainer.total_steps=1", words[0])
    assert "GRPO 1/1" in train(tmp_path, "second", *words)


@pytest.mark.full
def test_engines_draft_with_the_head_that_is_trained(tmp_path: Path) -> None:
    """Every update reaches the engines' head, as a checksum of a sync from scratch shows, and the
    log-probs of drafted tokens are the policy's."""
    published_folder("glm-4.5", tmp_path / "hf", num_nextn_predict_layers=1)
    words = (
        *("cluster=one-process", "rollout.engine=sglang", "rollout.speculative.method=mtp"),
        *("actor.mtp.train=true", "trainer.total_steps=2"),
    )
    assert "GRPO 2/2" in train(prepared(tmp_path), "first", *words)
    lines = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    trained = [one for one in map(json.loads, lines) if one["phase"] == "train"]
    assert all(one["rollout/logprob_diff/mean"] < 1e-4 for one in trained)
    assert all(1 <= one["engine/tokens_per_pass"] <= 2 for one in trained)
    assert all(0 <= one["engine/accepted_drafts"] <= 1 for one in trained)


@pytest.mark.full
def test_a_folder_of_mistral_whose_only_tokenizer_is_tekken_json(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    write_tekken(source)
    hf = {**MODELS["ministral3"], "vocab_size": 512, "eos_token_id": 2, "bos_token_id": 1}
    (source / "config.json").write_text(json.dumps(hf))
    weights = initial_weights(family_of(hf), seed=1)
    tensors = {
        name: weights.read(name, (0,) * len(shape), shape)
        for name, shape in weights.tensors.items()
    }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    out = train(prepared(tmp_path), "first", "sft=none", "trainer.total_steps=1")
    assert "GRPO 1/1" in out
    export = tmp_path / "runs" / "first" / "export"
    assert (export / "tekken.json").read_bytes() == (source / "tekken.json").read_bytes()
    assert load_tokenizer(export).digests() == load_tokenizer(source).digests()
