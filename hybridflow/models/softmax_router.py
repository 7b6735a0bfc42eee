"""Megatron's settings for the router of Mixtral and Qwen3-MoE: softmax scores, no groups, no
biases."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ModelError


def softmax_router_config(
    num_experts: int,
    topk: int,
    ffn: int,
    *,
    renormalised: bool,
    key: str = "num_experts_per_tok",
) -> dict[str, Any]:
    """Return the router's keyword arguments for TransformerConfig.

    With `renormalised` the probabilities of the selected experts are normalised to sum to 1. This
    equals a softmax over the selected logits alone. `key` is the family's config field for top-k,
    used in messages.

    Raises:
        ModelError: top-k exceeds the number of experts, or is 1 with renormalisation, a combination
            that Megatron's router rejects.
    """
    if topk > num_experts or (renormalised and topk == 1):
        wanted = (
            f"at most {num_experts}"
            if topk > num_experts
            else "at least 2 if probabilities are renormalised"
        )
        raise ModelError(f"{key}={topk} is not supported; it must be {wanted}")
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": not renormalised,
    }
