"""Multi-token-prediction heads: what they compute, that the policy does not notice them, and where
they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.cases.heads import LAYOUTS
from tests.dist.harness.ranks import run_ranks
from tests.dist.harness.rounding import FACTOR
from tests.models import FAMILIES

pytestmark = pytest.mark.slow
CASES = "tests.dist.cases.heads"
BOUND = 1e-5


def differing(cases: list[list[Any]], folder: Path, timeout_s: float) -> list[str]:
    """The cases that differ from the formula."""
    world = max(LAYOUTS[layout][1] for *_, layout in cases)
    found = run_ranks(
        world,
        f"{CASES}:against_the_formula",
        cases=cases,
        folder=str(folder),
        timeout_s=timeout_s,
    )[0]
    assert len(found) == len(cases)
    return [
        str(one)
        for one in found
        if one["targets"] != [0, 0]
        or max(one["metric"], one["gradient"]) >= BOUND
        or one["log_probs"] >= max(BOUND, FACTOR * one["rounding"])
    ]


def test_heads_compute_deepseeks_formula_and_its_gradient(tmp_path: Path) -> None:
    cases = [["GLM4", 1, "one process"], ["DEEPSEEK", 2, "TP2"], ["GLM4", 2, "PP2"]]
    assert differing(cases, tmp_path, 240) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["GLM4", "DEEPSEEK", "MOONLIGHT", "GLM_FLASH"])
def test_heads_compute_the_formula_in_every_layout(name: str, tmp_path: Path) -> None:
    cases = [[name, heads, layout] for heads in (1, 2) for layout in LAYOUTS]
    assert differing(cases, tmp_path, 900) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_heads_of_hybrid_models_compute_the_formula(name: str, tmp_path: Path) -> None:
    has_experts = "num_experts" in FAMILIES[name]
    cases = [[name, 1, layout] for layout in LAYOUTS if has_experts or "EP2" not in layout]
    assert differing(cases, tmp_path, 900) == []


def unequal(cases: list[list[Any]], timeout_s: float) -> list[str]:
    world = max(LAYOUTS[layout][1] for _, layout, *_ in cases)
    results = run_ranks(world, f"{CASES}:compared", cases=cases, timeout_s=timeout_s)
    assert len(results[0]) == len(cases)
    # the heads themselves are trained: the comparison is not of two policies without
    assert all(all(one["moved"]) for rank in results for one in rank)
    assert all(any(one["moved"] for one in case) for case in zip(*results, strict=False))
    return [f"{one['name']}: {one['differing'][:4]}" for rank in results for one in rank
            if one["differing"]]  # fmt: skip


def test_the_policy_is_bit_for_bit_that_of_a_run_without_heads() -> None:
    cases = [["GLM4", "PP2", "float32", True], ["DEEPSEEK", "EP2", "float32", False]]
    assert unequal(cases, 240) == []


@pytest.mark.full
def test_the_policy_does_not_notice_heads_in_any_layout() -> None:
    cases = [
        [name, layout, dtype, distributed]
        for name in ("GLM4", "DEEPSEEK")
        for layout in LAYOUTS
        for dtype, distributed in (("float32", True), ("bfloat16", True), ("float32", False))
    ]
    assert unequal(cases, 900) == []


def close(one: Any, other: Any, bound: float) -> bool:
    """Two states, of the same numbers up to a relative bound."""
    return all(
        value == pytest.approx(other["after"][name], rel=bound, abs=bound)
        for name, value in one["after"].items()
    )


def checkpointed(tmp_path: Path, name: str, layouts: list[str]) -> None:
    saved = run_ranks(
        LAYOUTS[layouts[0]][1], f"{CASES}:save", layout=layouts[0], name=name, folder=str(tmp_path)
    )
    for layout in layouts:
        found = run_ranks(
            LAYOUTS[layout][1], f"{CASES}:resume", layout=layout, name=name, folder=str(tmp_path)
        )
        # the sums of a digest are added up in the order of the ranks
        for tensor, sums in saved[0]["before"].items():
            assert found[0]["before"][tensor] == pytest.approx(sums, rel=1e-12, abs=1e-12)
        assert found[0]["facts"] == saved[0]["facts"] and found[0]["facts"]["updates"] == 2
        if layout == layouts[0]:
            assert found == saved
        else:
            assert close(found[0], saved[0], 1e-3)
    export_offline(tmp_path)
    export = exported(tmp_path / "export")
    offline = exported(tmp_path / "offline")
    assert export.keys() == offline.keys()
    assert all(torch.equal(value, offline[tensor]) for tensor, value in export.items())
    published = exported(tmp_path / "published")
    assert export.keys() == published.keys()  # with the copies of embedding and output layer
    layer = f"model.layers.{4}."
    assert torch.equal(export[f"{layer}embed_tokens.weight"], export["model.embed_tokens.weight"])
    assert torch.equal(export[f"{layer}shared_head.head.weight"], export["lm_head.weight"])
    for tensor, value in export.items():
        is_fixed = tensor.endswith("e_score_correction_bias")
        assert torch.equal(value, published[tensor]) == is_fixed, tensor
        if tensor in saved[0]["before"]:
            sums = [float(value.double().sum()), float(value.double().square().sum())]
            assert saved[0]["before"][tensor] == pytest.approx(sums, rel=1e-9, abs=1e-9)


def export_offline(folder: Path) -> None:
    """What `hybridflow checkpoint export` does."""
    from hybridflow.saving.tools import export

    export(folder / "checkpoint", folder / "offline", None, 1 << 30, None, folder / "published")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def test_heads_are_resumed_in_another_layout_and_exported(tmp_path: Path) -> None:
    checkpointed(tmp_path, "GLM4", ["PP2", "one process"])
    [said] = run_ranks(
        1,
        f"{CASES}:resume",
        layout="one process",
        name="GLM4",
        folder=str(tmp_path),
        without=True,
    )
    assert "contains trained multi-token-prediction heads" in said
    assert "actor.mtp.train=false" in said


@pytest.mark.full
def test_heads_are_resumed_and_exported_in_every_layout(tmp_path: Path) -> None:
    checkpointed(tmp_path, "DEEPSEEK", ["TP2 PP2 EP2", *LAYOUTS])
