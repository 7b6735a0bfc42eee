"""Low-rank adapters: every layout trains them as one process does, nothing else moves, and merged
they are what transformers computes.

The oracle of a merge is transformers: the base model's folder, with alpha / rank * B A of the
exported PEFT adapter added here. The oracle of an exported adapter is PEFT, which loads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hybridflow.cli.main import main
from hybridflow.engines.hf.engine import checkpoint_tensors
from tests.dist.cases.lora import ADAPTED, CASES, FURTHER_CASES, LORA, MUTANTS
from tests.dist.cases.parity import ROWS
from tests.dist.harness.policies import batch_of
from tests.dist.harness.ranks import run_ranks
from tests.models import DEEPSEEK, TINY

pytestmark = pytest.mark.slow
DENSE = {
    **TINY,
    "model_type": "qwen3",
    "tie_word_embeddings": True,
    "architectures": ["Qwen3ForCausalLM"],
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All layouts, and those with a communication left out, in one set of processes."""
    folder = str(tmp_path_factory.mktemp("lora"))
    found = run_ranks(
        4, "tests.dist.cases.lora:run_cases", timeout_s=300, names=[*CASES, *MUTANTS], folder=folder
    )
    return [result for results in found for result in results]


def differences(
    results: list[dict[str, Any]], names: Iterable[str]
) -> dict[tuple[str, str], float]:
    """By case and quantity, what is not one process's."""
    chosen = [result for result in results if result["name"] in names]
    assert len(chosen) == len(list(names))
    return {
        (r["name"], q): r[q]
        for r in chosen
        for q in ("tensors", "loss", "grad_norm")
        if not r[q] < TOLERANCE
    }


def test_every_layout_trains_adapters_as_one_process_does(results: list[dict[str, Any]]) -> None:
    """Factors, merged weights and log-probs after three clipped updates; gradient norms say that no
    share is counted twice or missed."""
    assert differences(results, CASES) == {}
    # every B has left zero
    assert min(result["moved"] for result in results if result["name"] in CASES) > 1e-3


@pytest.mark.full
def test_every_further_layout_trains_adapters_as_one_process_does(tmp_path: Path) -> None:
    ranks = run_ranks(
        4,
        "tests.dist.cases.lora:run_cases",
        timeout_s=400,
        names=list(FURTHER_CASES),
        folder=str(tmp_path),
    )
    found = [result for rank in ranks for result in rank]
    assert differences(found, FURTHER_CASES) == {}
    assert min(result["moved"] for result in found) > 1e-3
    assert [(r["name"], r["base_moved"], r["not_adapters"]) for r in found if r["base_moved"]] == []
    assert [(r["name"], r["not_adapters"]) for r in found if r["not_adapters"]] == []


@pytest.mark.parametrize("mutation", MUTANTS)
def test_a_communication_that_is_left_out_is_noticed(
    results: list[dict[str, Any]], mutation: str
) -> None:
    assert max(differences(results, [mutation]).values(), default=0) > 1e-3


def test_training_begins_at_the_base_and_moves_adapters_alone(
    results: list[dict[str, Any]],
) -> None:
    one = {result["name"].split()[0]: result for result in results if result["world"] == 1}
    assert {model: result["begins_at_the_base"] for model, result in one.items()} == {
        "dense": True,
        "moe": True,
        "deepseek": True,
        "experts": True,
    }
    assert max(result["begins_off_by"] for result in one.values()) < TOLERANCE
    assert [
        (r["name"], r["base_moved"], r["not_adapters"])
        for r in results
        if r["base_moved"] or r["not_adapters"]
    ] == []
    # 4 layers: qkv 32 -> 64, proj 32 -> 32, fc1 32 -> 128, fc2 64 -> 32, at rank 4
    assert one["dense"]["trainable"] == 4 * 4 * ((32 + 64) + (32 + 32) + (32 + 128) + (64 + 32))
    assert one["moe"]["trainable"] == 4 * 4 * ((32 + 64) + (32 + 32))  # routed experts have none
    # each of 4 experts in 4 layers: fc1 32 -> 64, fc2 32 -> 32
    assert one["experts"]["trainable"] == (4 + 4 * 4) * 4 * ((32 + 64) + (32 + 32))
    assert all(result["trainable"] < result["all"] / 5 for result in one.values())


@pytest.fixture(
    scope="module", params=["dense", "experts", pytest.param("deepseek", marks=pytest.mark.full)]
)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[dict[str, Any]]]:
    """(model, folder, by rank: the uninterrupted run at TP 2, PP 2)."""
    folder = tmp_path_factory.mktemp("lora")
    [hf, parallel, targets] = _model(request.param)
    return (
        request.param,
        folder,
        run_ranks(
            4,
            "tests.dist.cases.lora:export_save_and_go_on",
            parallel=parallel,
            hf=hf,
            targets=targets,
            folder=str(folder),
        ),
    )


def _model(name: str) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    parallel: dict[str, Any] = {"tensor": 2, "pipeline": 2, "sequence": True}
    if name == "dense":
        return DENSE, parallel, ()
    hf = {**TINY, "architectures": ["Qwen3MoeForCausalLM"]} if name == "experts" else DEEPSEEK
    return hf, {**parallel, "expert": 2}, ADAPTED[name][1]


def log_probs_of(model: Any) -> np.ndarray:
    """Response log-probs of `parity_cases`' batch under temperature 0.7."""
    batch = batch_of(ROWS, 7)
    found = []
    for i in range(len(batch)):
        prompt = batch["prompt_ids"].row(i)
        response = batch["response_ids"].row(i)
        with torch.no_grad():
            logits = (
                model(torch.from_numpy(np.concatenate([prompt, response]))[None]).logits[
                    0, len(prompt) - 1 : -1
                ]
                / 0.7
            )
        found.append(
            logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()
        )
    return np.concatenate(found)


def opened(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def exported(folder: Path, out: Path) -> Path:
    """The checkpoint's adapter in PEFT's format."""
    assert main(["checkpoint", "export", str(folder / "checkpoint"), str(out), "--adapter"]) == 0
    return out


def test_peft_loads_the_exported_adapter(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    """Experts have a rectangle of a stacked tensor in transformers; PEFT stacks their factors."""
    from peft import PeftModel

    model, folder, ranks = saved
    if model == "deepseek":
        pytest.skip("PEFT takes targets in its dense MLPs and shared experts for routed experts")
    base = opened(folder / "base")
    ours = np.array(ranks[0]["log_probs"][0])
    assert np.abs(log_probs_of(base) - ours).max() > 1e-2
    adapted = PeftModel.from_pretrained(base, str(exported(folder, tmp_path / "adapter"))).eval()
    assert np.abs(log_probs_of(adapted) - ours).max() < TOLERANCE


def test_merged_weights_and_base_with_adapter_are_the_trained_policy(
    saved: tuple[str, Path, Any], tmp_path: Path
) -> None:
    _, folder, ranks = saved
    ours = np.array(ranks[0]["log_probs"][0])
    assert ranks[0]["moved"] > 1e-2
    assert not any(rank["copies_left"] for rank in ranks)
    assert np.abs(log_probs_of(opened(folder / "hf")) - ours).max() < TOLERANCE
    exported(folder, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == (
        "LORA",
        LORA["rank"],
        LORA["alpha"],
    )
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base = opened(folder / "base")
    assert np.abs(log_probs_of(base) - ours).max() > 1e-2
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in factors}
    weights = dict(checkpoint_tensors(base))
    for module in modules:
        a, b = (factors[f"base_model.model.{module}.lora_{which}.weight"] for which in "AB")
        weights[f"{module}.weight"] += config["lora_alpha"] / config["r"] * b @ a
    assert np.abs(log_probs_of(base) - ours).max() < TOLERANCE
    # PEFT adapts a module whose name is a target or ends with one; experts are no modules
    matched = {
        name
        for name, _ in base.named_modules()
        if any(name == t or name.endswith(f".{t}") for t in config["target_modules"])
    }
    assert matched == {module for module in modules if ".mlp.experts." not in module}


def test_one_process_merges_a_checkpoint_of_four_ranks(
    saved: tuple[str, Path, Any], tmp_path: Path
) -> None:
    _, folder, _ = saved
    assert main(["checkpoint", "export", str(folder / "checkpoint"), str(tmp_path / "out")]) == 0
    [one], [two] = (
        [load_file(file) for file in at.glob("*.safetensors")]
        for at in (folder / "hf", tmp_path / "out")
    )
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_training_resumes_exactly_and_in_another_layout(
    saved: tuple[str, Path, list[dict[str, Any]]],
) -> None:
    model, folder, whole = saved
    hf, parallel, targets = _model(model)
    # the reference is the policy at that step, and a copy of adapters alone
    assert whole[0]["reference_off_by"] == 0
    assert 0 < whole[0]["reference_elements"] < 10_000
    arguments = {"hf": hf, "targets": targets, "folder": str(folder)}
    same = run_ranks(4, "tests.dist.cases.lora:load_and_go_on", parallel=parallel, **arguments)
    for expected, found in zip(whole, same, strict=True):
        assert all(found[key] == expected[key] for key in ("history", "factors", "reference"))
        assert len(found["errors"]) == 3
        assert all("actor.lora" in error and "was not loaded" in error for error in found["errors"])
    [one] = run_ranks(1, "tests.dist.cases.lora:load_and_go_on", parallel={}, **arguments)
    for name, values in whole[0]["factors"].items():
        assert np.abs(np.array(one["factors"][name]) - np.array(values)).max() < TOLERANCE, name
    assert np.abs(np.array(one["reference"]) - np.array(whole[0]["reference"])).max() < TOLERANCE
