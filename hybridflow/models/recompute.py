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
                f"{named} needs actor.recompute=selective, which is {recompute}; set one of them"
            )
        return
    if not modules:
        raise ModelError(
            f"{named} computes nothing again; name modules, or set actor.recompute=none"
        )
    if again := sorted({"moe_act", "shared_experts"} & set(modules)) if "moe" in modules else []:
        raise ModelError(
            f"{named}: moe is the whole layer of experts, {again[0]} with it; leave {again[0]} out"
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
        "mlp": (has_dense, "dense MLPs (moe computes layers of experts again)"),
        "mla_up_proj": (is_latent, "multi-head latent attention"),
        "layernorm": (
            has_experts or is_latent,
            "norms of their own: they are part of the linears behind them",
        ),
    }
    for module in modules:
        found, what = needs.get(module, (True, ""))
        if not found:
            raise ModelError(
                f"{named}: the layers of this model have no {what}; leave {module} out"
            )
