"""What Megatron must be told for the router of DeepSeek-V3 and GLM-4.5: sigmoid scores, groups, expert bias, shared
experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Experts


def sigmoid_experts(hf: Mapping[str, Any], hidden: int) -> Experts:
    """The block of a sparse layer."""
    ffn = int(hf["moe_intermediate_size"])
    shared = int(hf.get("n_shared_experts") or 0)
    return Experts(hidden, ffn, int(hf["n_routed_experts"]), shared_ffn=shared * ffn, expert_bias=True)


def sigmoid_router_config(hf: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig.

    Raises:
        ModelError: probabilities are not renormalised, which Megatron's sigmoid router always does; or groups of
        experts are chosen by
            another number than their best two, which is what published models and engines do.
    """
    if not hf.get("norm_topk_prob", True):
        raise ModelError(
            "norm_topk_prob false is not supported: Megatron's sigmoid router renormalises the chosen scores"
        )
    dense, ffn = int(hf.get("first_k_dense_replace") or 0), int(hf["moe_intermediate_size"])
    groups, topk = int(hf.get("n_group") or 1), int(hf["num_experts_per_tok"])
    # Megatron scores a group by its best topk // topk_group experts (moe_utils.py:554), transformers and SGLang by its
    # best two
    if groups > 1 and topk // int(hf["topk_group"]) != 2:
        raise ModelError(
            f"num_experts_per_tok {topk} with topk_group {hf['topk_group']} is not supported: Megatron scores a group "
            f"of experts by its "
            "best num_experts_per_tok // topk_group, Hugging Face by its best two; choose num_experts_per_tok = 2 * "
            "topk_group"
        )
    config: dict[str, Any] = {
        "num_moe_experts": int(hf["n_routed_experts"]),
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": [int(layer >= dense) for layer in range(num_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # the bias is loaded and streamed; moving it is a choice of the run (actor.expert_bias_update_rate), not of the
        # model
        "moe_router_bias_update_rate": 0.0,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor") or 1.0),
    }
    if groups > 1:
        config |= {"moe_router_num_groups": groups, "moe_router_group_topk": int(hf["topk_group"])}
    if hf.get("n_shared_experts"):
        config["moe_shared_expert_intermediate_size"] = int(hf["n_shared_experts"]) * ffn
    return config
