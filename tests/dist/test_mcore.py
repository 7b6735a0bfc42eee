"""The Megatron backend against transformers, and the layouts against one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dist.mcore_cases import TINY, batch_of
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.slow
FULL = {"tensor": 2, "pipeline": 2, "expert": 2, "sequence": True}
FULL_DENSE = {"tensor": 2, "pipeline": 2, "sequence": True}
DENSE = {**TINY, "model_type": "qwen3", "tie_word_embeddings": True}
SIZES = {key: value for key, value in TINY.items() if "expert" not in key and key not in ("decoder_sparse_step", "mlp_only_layers")}
LLAMA = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2 = {**SIZES, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MIXTRAL = {**SIZES, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
GLM4 = {
    **SIZES, "model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
    "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip


def oracle(folder: Path, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Response log-probs and entropies of transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    batch, log_probs, entropies = batch_of(12, 3), [], []
    for i in range(len(batch)):
        prompt, response = batch["prompt_ids"].row(i), batch["response_ids"].row(i)
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
        distribution = logits.log_softmax(-1)
        log_probs.append(distribution.gather(-1, torch.tensor(response)[:, None])[:, 0].numpy())
        entropies.append(-(distribution.exp() * distribution).sum(-1).numpy())
    return np.concatenate(log_probs), np.concatenate(entropies)


@pytest.mark.parametrize(
    ("parallel", "hf", "max_tokens"),
    [
        pytest.param({}, TINY, 4096, id="moe-1-process"),
        pytest.param(FULL, TINY, 40, id="moe-tp2-pp2-ep2"),
        pytest.param(FULL_DENSE, DENSE, 60, id="dense-tied-tp2-pp2"),
        pytest.param(FULL_DENSE, LLAMA, 60, id="llama-tp2-pp2"),
        pytest.param(FULL_DENSE, QWEN2, 60, id="qwen2-tp2-pp2"),
        pytest.param(FULL, {**MIXTRAL, "architectures": ["MixtralForCausalLM"]}, 60, id="mixtral-tp2-pp2-ep2"),
        pytest.param(FULL, {**GLM4, "architectures": ["Glm4MoeForCausalLM"]}, 60, id="glm4-moe-tp2-pp2-ep2"),
    ],
)
def test_log_probs_and_entropy_equal_transformers_on_the_exported_folder(tmp_path, parallel, hf, max_tokens):
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    results = run_ranks(
        world, "tests.dist.mcore_cases:log_probs_and_export", parallel=parallel, hf=hf, folder=str(tmp_path / "hf"), max_tokens=max_tokens
    )
    found = next(result for result in results if result)
    expected_log_probs, expected_entropy = oracle(tmp_path / "hf", 0.7)
    assert np.abs(np.array(found["log_probs"]) - expected_log_probs).max() < 1e-5
    assert np.abs(np.array(found["entropy"]) - expected_entropy).max() < 1e-5


@pytest.mark.parametrize("parallel", [pytest.param(FULL, id="tp2-pp2-ep2"), pytest.param({"expert": 2}, id="dp2-ep2")])
def test_training_does_not_depend_on_the_layout(parallel):
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1) if "tensor" in parallel else 2
    [one] = run_ranks(1, "tests.dist.mcore_cases:train", parallel={}, hf=TINY, steps=3, max_tokens=4096)
    many = run_ranks(world, "tests.dist.mcore_cases:train", parallel=parallel, hf=TINY, steps=3, max_tokens=40)
    np.testing.assert_allclose(many[0]["history"], one["history"], rtol=1e-4, atol=1e-5)
    weights: dict[str, list[float]] = {}
    for rank in many:
        weights |= rank["digest"]
    assert weights.keys() == one["digest"].keys()
    for name, expected in one["digest"].items():
        np.testing.assert_allclose(weights[name], expected, rtol=2e-5, atol=1e-4, err_msg=name)


def test_ranks_with_unequal_loads_run_the_same_number_of_micro_batches():
    """Experts' collectives span data-parallel ranks: a rank with less to do takes part with empty micro-batches."""
    found = run_ranks(2, "tests.dist.mcore_cases:unequal_loads", parallel={"expert": 2}, hf=TINY, rows=[1, 12], max_tokens=20)
    counts = [rank["micro_batches"] for rank in found]
    assert counts[0] == counts[1] > 1
    assert [rank["rows"] for rank in found] == [1, 12]
