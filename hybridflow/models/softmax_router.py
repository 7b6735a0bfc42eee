"""Megatron's settings for the router of Mixtral and Qwen3-MoE (softmax scores, no groups, no
biases), and the mixtures of Qwen2-MoE and Qwen3-Next, which have it next to a gated shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Experts


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


def gated_mixture(
    hidden: int, values: Mapping[str, Any], *, renormalised: bool
) -> tuple[Experts, dict[str, Any]]:
    """Return routed experts with a gated shared expert, and the keyword arguments of both for
    TransformerConfig. `values` are the family's fields. Raises ModelError as
    `softmax_router_config` does.
    """
    names = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts")
    ffn, shared_ffn, num_experts = (int(values[name]) for name in names)
    topk = int(values["num_experts_per_tok"])
    router = softmax_router_config(num_experts, topk, ffn, renormalised=renormalised)
    experts = Experts(
        hidden, ffn, num_experts, shared_ffn=shared_ffn, shared="shared_expert", shared_gate=True
    )
    return experts, router | {
        "moe_shared_expert_intermediate_size": shared_ffn,
        "moe_shared_expert_gate": True,
    }
