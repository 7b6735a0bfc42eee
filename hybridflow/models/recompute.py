"""Check which modules of a model support selective recomputation.

Megatron silently ignores modules that the model does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.errors import ModelError
from hybridflow.models.family import Family


def check_recompute(family: Family, recompute: str, modules: Sequence[str]) -> None:
    """Raise ModelError if `actor.recompute_modules` does not apply to this model."""
    named = f"actor.recompute_modules={list(modules)}"
    if recompute != "selective":
        if tuple(modules) != ("core_attn",):
            raise ModelError(
                f"{named} requires actor.recompute=selective, got {recompute}; change one of them"
            )
        return
    if not modules:
        raise ModelError(f"{named} recomputes nothing; list modules, or set actor.recompute=none")
    if again := sorted({"moe_act", "shared_experts"} & set(modules)) if "moe" in modules else []:
        raise ModelError(
            f"{named}: moe recomputes the whole expert layer, including {again[0]}; remove "
            f"{again[0]}"
        )
    config = family.megatron_config()
    has_experts = bool(config.get("num_moe_experts"))
    is_latent = bool(config.get("multi_latent_attention"))
    kinds = config.get("moe_layer_freq", 1)
    has_dense = not has_experts or (0 in kinds if isinstance(kinds, list) else kinds > 1)
    shared = bool(config.get("moe_shared_expert_intermediate_size"))
    needs = {
        "moe": (has_experts, "experts"),
        "moe_act": (has_experts, "experts"),
        "shared_experts": (shared, "shared experts"),
        "mlp": (has_dense, "dense MLPs (moe recomputes expert layers)"),
        "mla_up_proj": (is_latent, "multi-head latent attention"),
        "layernorm": (
            has_experts or is_latent,
            "separate norms: they are part of the following linears",
        ),
    }
    for module in modules:
        found, what = needs.get(module, (True, ""))
        if not found:
            raise ModelError(f"{named}: this model's layers have no {what}; remove {module}")
