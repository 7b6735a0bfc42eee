"""GLM-4.7-Flash: DeepSeek-V3's latent attention and router; config.json lists the kind of MLP for
each layer."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.errors import ModelError
from hybridflow.models.families.deepseek_v3 import DeepseekV3
from hybridflow.models.family import FAMILIES
from hybridflow.models.sigmoid_router import LAYER_SIZES


class Glm4MoeLite(DeepseekV3):
    """Parameter map of a `glm4_moe_lite` config."""

    architecture = "Glm4MoeLiteForCausalLM"
    positions = 202752
    fields = replace(
        DeepseekV3.fields,
        used={
            **LAYER_SIZES,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "q_lora_rank": 768,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "mlp_layer_types": None,
        },
        # transformers reads mlp_layer_types instead of first_k_dense_replace, which published
        # configs still contain
        unused=DeepseekV3.fields.unused | {"first_k_dense_replace"},
    )

    def num_dense(self) -> int:
        """Return the number of dense layers in `mlp_layer_types`, or 1 if config.json does not
        contain it.

        Raises:
            ModelError: the list's length differs from the number of layers, or a dense layer
                follows a sparse one.
        """
        kinds = self.values["mlp_layer_types"]
        if kinds is None:
            return 1
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (self.num_layers - dense):
            raise ModelError(
                f"mlp_layer_types={kinds} is not supported: it must have one entry per layer "
                f"(num_hidden_layers={self.num_layers}), dense layers before sparse ones"
            )
        return int(dense)


FAMILIES.register("glm4_moe_lite", Glm4MoeLite)
