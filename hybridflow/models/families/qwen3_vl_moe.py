"""Qwen3-VL (mixture of experts): Qwen3-MoE with Qwen3-VL's vision tower."""

from __future__ import annotations

from hybridflow.models.families.qwen3_moe import Qwen3Moe
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.vision_decoder import UNUSED, VisionDecoder


class Qwen3VlMoe(VisionDecoder, Qwen3Moe):
    """Parameter map of a `qwen3_vl_moe` config.

    Attributes:
        stacks_experts: transformers reads the experts of a layer only from stacked tensors.
    """

    architecture = "Qwen3VLMoeForConditionalGeneration"
    stacks_experts = True
    positions = 128000
    theta = 500000.0
    fields = Fields(
        used={
            "moe_intermediate_size": REQUIRED,
            "num_experts": REQUIRED,
            "num_experts_per_tok": 4,
            "head_dim": None,
            "num_key_value_heads": 16,
        },
        fixed={
            "attention_bias": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": (),
            # transformers always renormalises
            "norm_topk_prob": (True,),
        },
        unused=UNUSED | {"intermediate_size", "output_router_logits", "router_aux_loss_coef"},
        nullable=frozenset({"num_key_value_heads"}),
        aliases={"num_local_experts": "num_experts"},
    )

    def layer_windows(self) -> tuple[int, ...]:
        """Return no windows."""
        return ()


FAMILIES.register("qwen3_vl_moe", Qwen3VlMoe)
