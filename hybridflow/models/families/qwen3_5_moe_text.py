"""Qwen3.5 (text, mixture of experts): Qwen3.5's layers with experts and a gated shared expert."""

from __future__ import annotations

from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import Fields
from hybridflow.models.hybrid_decoder import FIXED, LAYERS, UNUSED, HybridMixture


class Qwen35MoeText(HybridMixture):
    """Parameter map of a `qwen3_5_moe_text` config."""

    architecture = "Qwen3_5MoeForCausalLM"
    fields = Fields(
        used={
            **LAYERS,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        fixed=FIXED,
        unused=UNUSED | {"output_router_logits", "router_aux_loss_coef", "mlp_only_layers"},
    )


FAMILIES.register("qwen3_5_moe_text", Qwen35MoeText)
