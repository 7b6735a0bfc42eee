"""Critics and reward models against transformers, and the layouts against one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dist.harness.policies import FULL, FULL_DENSE, batch_of
from tests.dist.harness.ranks import run_ranks
from tests.models import DENSE, LLAMA, QWEN2, TINY

pytestmark = pytest.mark.slow
TOKENS = "ForTokenClassification"
SEQUENCE = "ForSequenceClassification"


def oracle(folder: Path, task: str) -> tuple[list[float], list[float]]:
    """Values of response tokens (token classifier) or scores (sequence classifier) of transformers,
    one sequence at a time."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto = AutoModelForTokenClassification if task == TOKENS else AutoModelForSequenceClassification
    model, report = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        report
    )
    model.eval()
    batch = batch_of(12, 3)
    values = []
    scores = []
    for i in range(len(batch)):
        prompt = batch["prompt_ids"].row(i)
        response = batch["response_ids"].row(i)
        with torch.no_grad():
            logits = model(torch.from_numpy(np.concatenate([prompt, response]))[None]).logits[0]
        if task == TOKENS:
            # the state before each response token
            values += logits[len(prompt) - 1 : -1, 0].tolist()
        else:
            scores += logits.tolist()
    return values, scores


@pytest.mark.parametrize(
    ("parallel", "hf", "task", "bias", "max_tokens"),
    [
        pytest.param({}, TINY, TOKENS, True, 4096, id="moe-1-process"),
        pytest.param({}, DENSE, SEQUENCE, False, 20, id="tied-1-process", marks=pytest.mark.full),
        pytest.param(FULL, TINY, TOKENS, False, 40, id="moe-tp2-pp2-ep2"),
        pytest.param(
            FULL, TINY, SEQUENCE, False, 40, id="moe-score-tp2-pp2-ep2", marks=pytest.mark.full
        ),
        pytest.param(FULL_DENSE, DENSE, TOKENS, True, 60, id="tied-tp2-pp2"),
        pytest.param(
            {"tensor": 2, "pipeline": 2},
            DENSE,
            SEQUENCE,
            False,
            60,
            id="tied-score-tp2-pp2-without-sp",
        ),
        pytest.param(
            FULL_DENSE, LLAMA, TOKENS, False, 60, id="llama-tp2-pp2", marks=pytest.mark.full
        ),
        pytest.param(FULL_DENSE, QWEN2, SEQUENCE, False, 60, id="qwen2-score-tp2-pp2"),
    ],
)
def test_values_and_scores_equal_transformers_on_the_exported_folder(
    tmp_path, parallel, hf, task, bias, max_tokens
):
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    hf = {**hf, "architectures": ["ThisForCausalLM"]}
    arguments = {
        "parallel": parallel,
        "hf": hf,
        "folder": str(tmp_path / "hf"),
        "task": task,
        "bias": bias,
        "max_tokens": max_tokens,
    }
    found = next(
        result
        for result in run_ranks(world, "tests.dist.cases.scalar:outputs_and_export", **arguments)
        if result
    )
    expected_values, expected_scores = oracle(tmp_path / "hf", task)
    if task == TOKENS:
        assert np.abs(np.array(found["values"]) - expected_values).max() < 1e-5
    else:
        assert np.abs(np.array(found["scores"]) - expected_scores).max() < 1e-5
    assert np.std(found["values"]) > 0.1  # the weights do give values that differ
    assert found["again"] == found["values"]


@pytest.mark.parametrize(
    ("parallel", "pairs", "masked"),
    [
        pytest.param(FULL, False, False, id="values-tp2-pp2-ep2", marks=pytest.mark.full),
        pytest.param(FULL, False, True, id="masked-values-tp2-pp2-ep2"),
        pytest.param({"context": 2}, False, True, id="masked-values-cp2"),
        pytest.param({"expert": 2}, True, False, id="pairs-dp2-ep2", marks=pytest.mark.full),
        pytest.param(FULL, True, False, id="pairs-tp2-pp2-ep2"),
    ],
)
def test_training_does_not_depend_on_the_layout(parallel, pairs, masked):
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1) if "tensor" in parallel else 2
    given = {"hf": TINY, "pairs": pairs, "steps": 3, "masked": masked}
    [one] = run_ranks(1, "tests.dist.cases.scalar:train", parallel={}, max_tokens=4096, **given)
    many = run_ranks(
        world, "tests.dist.cases.scalar:train", parallel=parallel, max_tokens=40, **given
    )
    np.testing.assert_allclose(many[0]["history"], one["history"], rtol=1e-4, atol=1e-5)
    weights: dict[str, list[float]] = {}
    for rank in many:
        weights |= rank["digest"]
    assert weights.keys() == one["digest"].keys()
    for name, expected in one["digest"].items():
        np.testing.assert_allclose(weights[name], expected, rtol=2e-5, atol=1e-4, err_msg=name)


def test_a_critic_goes_on_from_its_checkpoint(tmp_path):
    arguments = {"parallel": FULL, "hf": TINY, "folder": str(tmp_path / "critic")}
    whole = run_ranks(4, "tests.dist.cases.scalar:save_or_load", **arguments, load=False)
    resumed = run_ranks(4, "tests.dist.cases.scalar:save_or_load", **arguments, load=True)
    assert resumed == whole


def test_a_critics_gradient_that_is_not_finite_is_skipped_where_the_actors_is():
    [found] = run_ranks(1, "tests.dist.cases.roles:not_finite")
    assert found == {"applied": 0.0, "moved": [], "after": 1.0}
