"""gpt-oss: attention with sinks and biases, sliding windows in every other layer, YaRN, and experts
with biases and a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import Fields
from hybridflow.models.fused_experts import FusedExperts
from hybridflow.models.rotary import Rotary
from hybridflow.models.softmax_router import softmax_router_config
from hybridflow.models.windows import layer_windows

# transformers' rope_parameters where config.json has none
_ROTARY = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_EXPERTS = ("num_local_experts", "num_experts_per_tok", "intermediate_size")


class GptOss(Decoder):
    """Parameter map of a `gpt_oss` config."""

    architecture = "GptOssForCausalLM"
    positions = 131072
    theta = 150000.0
    qkv_bias = True
    fields = Fields(
        used={
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "layer_types": None,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        fixed={"attention_bias": (True,)},
        # experts_per_token and initial_context_length repeat other fields of the published configs
        unused=frozenset(
            {
                *("output_router_logits", "router_aux_loss_coef"),
                *("experts_per_token", "initial_context_length"),
            }
        ),
        nullable=frozenset({"head_dim", "num_key_value_heads", "sliding_window"}),
        aliases={"num_experts": "num_local_experts"},
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.windows = layer_windows(
            self.values["sliding_window"],
            self.num_layers,
            self.values["layer_types"],
            lambda layer: layer % 2 == 0,
        )
        self.num_experts, topk, self.ffn = (int(self.values[name]) for name in _EXPERTS)
        self.router = softmax_router_config(self.num_experts, topk, self.ffn, renormalised=True)

    def rotaries(self) -> tuple[Rotary, Rotary | None]:
        """Return the rotary embedding that all layers share."""
        has_settings = self.hf.get("rope_scaling") or self.hf.get("rope_parameters")
        hf = self.hf if has_settings else {**self.hf, "rope_parameters": _ROTARY}
        return Rotary.of(hf, self.head_dim, theta=self.theta, positions=self.positions), None

    def attention(self, layer: int) -> Block:
        """Return attention with one sink per head and a bias on its output."""
        return GroupedAttention(
            self.hidden,
            self.heads,
            self.groups,
            self.head_dim,
            qkv_bias=True,
            out_bias=True,
            sinks=True,
        )

    def mlp(self, layer: int) -> Block:
        """Return an experts block for every layer."""
        alpha, limit = (float(self.values[f"swiglu_{name}"]) for name in ("alpha", "limit"))
        return FusedExperts(self.hidden, self.ffn, self.num_experts, alpha, limit)

    def megatron_config(self) -> dict[str, Any]:
        """Return the keyword arguments of TransformerConfig, with biases and sinks."""
        return super().megatron_config() | {
            "add_bias_linear": True,
            "softmax_type": "learnable",
        }


FAMILIES.register("gpt_oss", GptOss)
