"""The Megatron backend against transformers, and the layouts against one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.dist.cases.mcore import TOP
from tests.dist.harness.oracle import oracle
from tests.dist.harness.policies import FULL, FULL_DENSE, batch_of
from tests.dist.harness.ranks import run_ranks
from tests.models import (
    DEEPSEEK,
    DENSE,
    GLM4,
    GLM_FLASH,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    MOONLIGHT,
    QWEN2,
    QWEN2_MOE,
    SEED_OSS,
    TINY,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("parallel", "hf", "max_tokens"),
    [
        pytest.param({}, TINY, 4096, id="moe-1-process"),
        pytest.param(FULL, TINY, 40, id="moe-tp2-pp2-ep2"),
        pytest.param(FULL_DENSE, DENSE, 60, id="dense-tied-tp2-pp2"),
        pytest.param(
            {"pipeline": 2, "virtual_pipeline": 2, "context": 2}, LLAMA, 60, id="llama-pp2-vpp2-cp2"
        ),
        # its biases in these ranks: test_scalar_heads.py
        pytest.param(FULL_DENSE, QWEN2, 60, id="qwen2-tp2-pp2", marks=pytest.mark.full),
        pytest.param(
            FULL,
            {**MIXTRAL, "architectures": ["MixtralForCausalLM"]},
            60,
            id="mixtral-tp2-pp2-ep2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            FULL, {**GLM4, "architectures": ["Glm4MoeForCausalLM"]}, 60, id="glm4-moe-tp2-pp2-ep2"
        ),
        pytest.param({}, DEEPSEEK, 14, id="deepseek-1-process-about-a-sequence-at-a-time"),
        pytest.param(FULL, DEEPSEEK, 60, id="deepseek-tp2-pp2-ep2"),
        pytest.param(FULL, MOONLIGHT, 40, id="moonlight-tp2-pp2-ep2", marks=pytest.mark.full),
        pytest.param(FULL, QWEN2_MOE, 60, id="qwen2-moe-tp2-pp2-ep2"),
        pytest.param(FULL, GLM_FLASH, 60, id="glm-4.7-flash-tp2-pp2-ep2", marks=pytest.mark.full),
        pytest.param(FULL_DENSE, MISTRAL, 60, id="mistral-tp2-pp2", marks=pytest.mark.full),
        pytest.param(
            {"pipeline": 2, "context": 2},
            SEED_OSS,
            60,
            id="seed-oss-pp2-cp2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_log_probs_and_entropy_equal_transformers_on_the_exported_folder(
    tmp_path, parallel, hf, max_tokens
):
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("context", 1)
    results = run_ranks(
        world,
        "tests.dist.cases.mcore:log_probs_and_export",
        parallel=parallel,
        hf=hf,
        folder=str(tmp_path / "hf"),
        max_tokens=max_tokens,
    )
    found = next(result for result in results if result)
    expected_log_probs, expected_entropy, whole = oracle(tmp_path / "hf", 0.7)
    assert np.abs(np.array(found["log_probs"]) - expected_log_probs).max() < 1e-5
    assert np.abs(np.array(found["entropy"]) - expected_entropy).max() < 1e-5
    values = np.array(found["top_values"])
    tokens = np.array(found["top_tokens"])
    assert values.shape == tokens.shape == (len(expected_entropy), TOP)
    # the most likely tokens of the whole vocabulary in order, each with its own log-prob
    assert np.abs(values + np.sort(-whole, axis=-1)[:, :TOP]).max() < 1e-5
    assert np.abs(values - np.take_along_axis(whole, tokens, -1)).max() < 1e-5


def test_a_wrong_map_entry_changes_log_probs():
    """With the comparison to transformers above: whoever mixes up two tensors of one shape, which
    no proof can see, is caught."""
    models = {
        "llama": LLAMA,
        "qwen2": QWEN2,
        "qwen3": DENSE,
        "qwen3_moe": TINY,
        "mixtral": MIXTRAL,
        "glm4_moe": GLM4,
    }
    models |= {
        "deepseek_v3": DEEPSEEK,
        "moonlight": MOONLIGHT,
        "qwen2_moe": QWEN2_MOE,
        "seed_oss": SEED_OSS,
    }
    [changes] = run_ranks(1, "tests.dist.cases.mutation:log_prob_changes", models=models)
    everywhere = {"gate and up exchanged", "norms exchanged", "next layer's output projection"}
    sparse = {"one expert off", "router's rows exchanged"}
    grouped = {"key and value exchanged"}
    latent = {"rows of the latents' up projection exchanged", "no expert bias"} | sparse
    expected = {
        "llama": grouped,
        "qwen2": grouped | {"no bias"},
        "qwen3": grouped | {"norms of query and key exchanged"},
        "qwen3_moe": grouped | sparse | {"norms of query and key exchanged"},
        "mixtral": grouped | sparse,
        "glm4_moe": grouped
        | sparse
        | {"norms of query and key exchanged", "no bias", "no expert bias"},
        "deepseek_v3": latent | {"rows of the query's up projection exchanged"},
        "moonlight": latent,
        "qwen2_moe": grouped | sparse | {"no bias"},
        "seed_oss": grouped | {"no bias"},
    }
    assert {name: set(found) for name, found in changes.items()} == {
        name: everywhere | more for name, more in expected.items()
    }
    assert {(n, m): c for n, found in changes.items() for m, c in found.items() if c < 1e-3} == {}


def test_expert_biases_move_towards_even_load_and_the_reference_keeps_its_own(tmp_path):
    """The oracle counts the tokens of each expert in transformers, on the weights before the
    update."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    before = tmp_path / "before"
    after = tmp_path / "after"
    [log_probs] = run_ranks(
        1,
        "tests.dist.cases.mcore:move_expert_biases",
        parallel={},
        hf=DEEPSEEK,
        before=str(before),
        after=str(after),
        rate=0.01,
    )
    assert log_probs[0] == log_probs[1]
    model = AutoModelForCausalLM.from_pretrained(
        before, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    counts = {layer: torch.zeros(8) for layer in range(1, 4)}

    def counting(count):
        def hook(module, args, out):
            count.add_(torch.bincount(out[2].reshape(-1), minlength=8))

        return hook

    for layer, count in counts.items():
        model.model.layers[layer].mlp.gate.register_forward_hook(counting(count))
    batch = batch_of(8, 0)
    for i in range(len(batch)):
        ids = np.concatenate([batch["prompt_ids"].row(i), batch["response_ids"].row(i)])
        with torch.no_grad():
            model(torch.from_numpy(ids)[None])
    old, new = (load_file(next(folder.glob("*.safetensors"))) for folder in (before, after))
    for layer, count in counts.items():
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        expected = old[name] + 0.01 * torch.sign(count.mean() - count)
        assert len(count.unique()) > 1
        torch.testing.assert_close(new[name], expected, rtol=0, atol=1e-6)


def test_ranks_with_unequal_loads_run_the_same_number_of_micro_batches():
    """Experts' collectives span data-parallel ranks: a rank with less to do takes part with empty
    micro-batches."""
    found = run_ranks(
        2,
        "tests.dist.cases.mcore:unequal_loads",
        parallel={"expert": 2},
        hf=TINY,
        rows=[1, 12],
        max_tokens=20,
    )
    counts = [rank["micro_batches"] for rank in found]
    assert counts[0] == counts[1] > 1
    assert [rank["rows"] for rank in found] == [1, 12]
