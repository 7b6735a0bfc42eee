"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the others, and experts
with a gated shared expert."""

from __future__ import annotations

from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import Fields
from hybridflow.models.hybrid_decoder import FIXED, LAYERS, UNUSED, HybridMixture


class Qwen3Next(HybridMixture):
    """Parameter map of a `qwen3_next` config."""

    architecture = "Qwen3NextForCausalLM"
    fused = True
    fields = Fields(
        used={
            **LAYERS,
            "num_key_value_heads": 2,
            "intermediate_size": 5632,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        fixed=FIXED,
        unused=UNUSED | {"output_router_logits", "router_aux_loss_coef"},
    )


FAMILIES.register("qwen3_next", Qwen3Next)
