"""The layers of DeepSeek-V3 and GLM-4.5, and Megatron's settings for their router.

The router uses sigmoid scores, expert groups and an expert bias; layers also have shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import Block, Experts
from hybridflow.models.decoder import Decoder
from hybridflow.models.fields import REQUIRED

LAYER_SIZES: Mapping[str, Any] = dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    REQUIRED,
)
# Megatron's sigmoid router always renormalises the selected scores
ROUTER_FIXED: Mapping[str, tuple[Any, ...]] = {"norm_topk_prob": (True,)}
ROUTER_UNUSED = frozenset({"output_router_logits", "num_mtp_layers", "num_nextn_predict_layers"})
EXPERT_ALIASES: Mapping[str, str] = {"num_local_experts": "n_routed_experts"}


class SigmoidDecoder(Decoder):
    """Base class of the families with this router: a gated MLP in the first `first_k_dense_replace`
    layers, experts in all others.
    """

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.values["first_k_dense_replace"] = self.num_dense()
        self.router = sigmoid_router_config(self.values)

    def num_prediction_heads(self) -> int:
        """Return `num_nextn_predict_layers`."""
        return int(self.hf.get("num_nextn_predict_layers") or 0)

    def num_dense(self) -> int:
        """Return the number of initial layers with a gated MLP instead of experts."""
        return int(self.values["first_k_dense_replace"])

    def mlp(self, layer: int) -> Block:
        """Return a gated MLP for a dense layer, else an experts block with shared experts."""
        if layer < int(self.values["first_k_dense_replace"]):
            return super().mlp(layer)
        keys = ("moe_intermediate_size", "n_routed_experts")
        ffn, experts = (int(self.values[key]) for key in keys)
        shared_ffn = int(self.values["n_shared_experts"]) * ffn
        return Experts(
            self.hidden, ffn, experts, shared_ffn=shared_ffn, expert_bias=True, keys=keys
        )


def sigmoid_router_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the router's keyword arguments for TransformerConfig.

    Raises:
        ModelError: the experts cannot be divided into groups that allow this top-k, or Megatron
            would not score a group by its best two experts, as published models and engines do.
    """
    dense = int(values["first_k_dense_replace"])
    ffn = int(values["moe_intermediate_size"])
    groups, chosen, topk = (
        int(values[name]) for name in ("n_group", "topk_group", "num_experts_per_tok")
    )
    experts = int(values["n_routed_experts"])
    if (
        experts % groups
        or experts < 2 * groups
        or chosen > groups
        or topk > experts // groups * chosen
    ):
        raise ModelError(
            f"num_experts_per_tok={topk} of n_routed_experts={experts} cannot be selected from "
            f"topk_group={chosen} of n_group={groups} groups; groups must have equal sizes of at "
            "least two experts, and the selected groups at least num_experts_per_tok experts"
        )
    if topk == 1:  # moe_utils.py:721 renormalises only if topk > 1
        raise ModelError(
            "num_experts_per_tok=1 is not supported: Megatron's sigmoid router does not "
            "renormalise a single score"
        )
    # Megatron scores a group by its best topk // topk_group experts (moe_utils.py:554),
    # transformers and SGLang by its best two
    if groups > 1 and topk // chosen != 2:
        raise ModelError(
            f"num_experts_per_tok={topk} with topk_group={chosen} of n_group={groups} is not "
            "supported: Megatron scores a group of experts by its best num_experts_per_tok // "
            "topk_group, Hugging Face by its best two; choose num_experts_per_tok = 2 * topk_group"
        )
    config: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": [
            int(layer >= dense) for layer in range(int(values["num_hidden_layers"]))
        ],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # the bias is loaded and synced; updating it is optional (actor.expert_bias_update_rate)
        "moe_router_bias_update_rate": 0.0,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": float(values["routed_scaling_factor"]),
    }
    if groups > 1:
        config |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    if values["n_shared_experts"]:
        config["moe_shared_expert_intermediate_size"] = int(values["n_shared_experts"]) * ffn
    return config
