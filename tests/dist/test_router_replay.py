"""Router replay in Megatron: any layout against one process, own routes against none, recomputation
against none, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.dist.harness.policies import FULL
from tests.dist.harness.ranks import run_ranks
from tests.models import DENSE_UNTIED, GLM4, TINY

pytestmark = pytest.mark.slow


def merged(ranks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return {key: value for rank in ranks for key, value in rank[name].items()}


def total(ranks: list[dict[str, Any]], name: str, count: str) -> int:
    return sum(rank[name][count] for rank in ranks)


CASE = "tests.dist.cases.replay:replayed"
LAYOUTS = {
    "tp2-pp2-ep2": (4, FULL, TINY),
    "pp2-vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, TINY),
    "cp2-ep2": (2, {"context": 2, "expert": 2}, TINY),
    "glm4-moe-sigmoid-bias-first-layer-dense": (4, FULL, GLM4),
}


@functools.cache
def one_process(model_type: str) -> dict[str, Any]:
    [one] = run_ranks(
        1, CASE, parallel={}, hf=GLM4 if model_type == "glm4_moe" else TINY, max_tokens=4096
    )
    return one


@pytest.mark.parametrize(
    "layout",
    [
        # its stages are those of the first one, in more chunks
        pytest.param(layout, marks=[pytest.mark.full] if layout == "pp2-vpp2" else [])
        for layout in LAYOUTS
    ],
)
def test_replay_is_the_same_on_any_layout(layout: str) -> None:
    world, parallel, hf = LAYOUTS[layout]
    one = one_process(hf["model_type"])
    many = run_ranks(world, CASE, parallel=parallel, hf=hf, max_tokens=40)
    last = next(rank for rank in many if rank["free"])

    # the routes matter, and give the same values everywhere
    assert np.abs(np.array(one["given"]) - one["free"]).max() > 0.05
    for name in ("free", "given", "own"):
        np.testing.assert_allclose(last[name], one[name], atol=2e-5)
    np.testing.assert_array_equal(one["own"], one["free"])
    assert last["recorded"] == one["recorded"] == many[0]["recorded"]

    # every token-layer that was sent was used, and counted once over all ranks
    layers = hf["num_hidden_layers"] - hf.get("first_k_dense_replace", 0)
    tokens = len(one["recorded"])
    sent = (tokens - 12) * layers  # all but the last token of each of 12 samples
    assert total(many, "counts", "routers") == one["counts"]["routers"] == layers
    for name in ("counts", "own_counts"):
        for ranks in ([one], many):
            assert total(ranks, name, "sent") == total(ranks, name, "used") == sent
            assert total(ranks, name, "mismatched") == 0
    assert one["own_counts"]["differing"] == total(many, "own_counts", "differing") == 0
    assert 0.3 * sent < one["counts"]["differing"]
    # not equal: under replay later layers see the hidden states that the given experts made
    assert one["compared_counts"]["differing"] == total(many, "compared_counts", "differing") > 0

    for rank in (one, *many):
        gradients = rank["gradients"]
        assert max(gradients["own"], gradients["full"], gradients["moe"]) <= 1e-6, gradients
        assert gradients["other"] > 1e-2, gradients
    np.testing.assert_allclose(many[0]["norms"], one["norms"], rtol=1e-4)
    weights = merged(many, "digest")
    assert weights.keys() == one["digest"].keys()
    for name, expected in one["digest"].items():
        np.testing.assert_allclose(weights[name], expected, rtol=2e-5, atol=1e-4, err_msg=name)


def test_what_cannot_be_replayed_is_an_error_that_says_why() -> None:
    [said] = run_ranks(1, "tests.dist.cases.replay:broken", parallel={}, hf=TINY)
    assert said["fine"] == said["fine again"] == "nothing"
    assert "has no column 'routed_experts'" in said["no column"]
    assert (
        "shape [3, 2] per token, but the model has 4 layers and 2 experts" in said["other layers"]
    )
    assert "contains expert 7" in said["other expert"]
    assert "of row 0 has" in said["other lengths"]
    assert "router replay failed" in said["twice"]
    assert "router replay failed" in said["not asked"]
    assert all(
        line.startswith("RouterReplayError: ")
        for name, line in said.items()
        if not name.startswith("fine")
    )
    [said] = run_ranks(1, "tests.dist.cases.replay:broken", parallel={}, hf=DENSE_UNTIED)
    assert "requires a mixture of experts" in said["fine"]
