"""Gemma 3 (text): zero-centered norms before and after attention and MLP, scaled embeddings, GELU,
and sliding windows with a separate rotary base in most layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention, Norms
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields
from hybridflow.models.rotary import Rotary, rotaries_by_kind
from hybridflow.models.windows import layer_windows


class Gemma3Text(Decoder):
    """Parameter map of a `gemma3_text` config."""

    architecture = "Gemma3ForCausalLM"
    positions = 131072
    theta = 1e6
    qk_norm = True
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
            "rope_local_base_freq": 10000.0,
        },
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "use_bidirectional_attention": (False,),
            "attn_logit_softcapping": (),
            "final_logit_softcapping": (),
        },
        unused=frozenset({"cache_implementation"}),
        nullable=frozenset({"sliding_window"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.windows = layer_windows(
            self.values["sliding_window"],
            self.num_layers,
            self.values["layer_types"],
            lambda layer: (layer + 1) % self.values["sliding_window_pattern"] != 0,
        )
        self.embedding_scale = self.hidden**0.5

    def rotaries(self) -> tuple[Rotary, Rotary]:
        """Return the rotary embeddings of full-attention layers and of sliding-window layers."""
        return rotaries_by_kind(
            self.hf,
            self.head_dim,
            theta=self.theta,
            local_theta=float(self.values["rope_local_base_freq"]),
            positions=self.positions,
        )

    def attention(self, layer: int) -> Block:
        """Return attention with a norm before and after it."""
        norms = Norms("input_layernorm", "post_attention_layernorm")
        return GroupedAttention(
            self.hidden, self.heads, self.groups, self.head_dim, qk_norm=True, norms=norms
        )

    def mlp(self, layer: int) -> Block:
        """Return a gated MLP with a norm before and after it."""
        norms = Norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
        return DenseMlp(self.hidden, int(self.values["intermediate_size"]), norms=norms)

    def megatron_config(self) -> dict[str, Any]:
        """Return the keyword arguments of TransformerConfig, including the activation and the scale
        of attention logits."""
        from torch.nn.functional import gelu  # planning does not need torch

        return super().megatron_config() | {
            "activation_func": functools.partial(gelu, approximate="tanh"),
            "softmax_scale": float(self.values["query_pre_attn_scalar"]) ** -0.5,
            "layernorm_zero_centered_gamma": True,
        }


FAMILIES.register("gemma3_text", Gemma3Text)
