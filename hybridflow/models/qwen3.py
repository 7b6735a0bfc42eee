"""Qwen3 and Qwen3-MoE: grouped-query attention with per-head q/k norm, SwiGLU, softmax router with renormalised top-k.

Megatron side (Transformer Engine parameter names): `linear_qkv` interleaves by KV group: [q heads of the group, k, v] for each group;
`linear_fc1` stacks gate over up within a rank's share; the input norm is a parameter of the linear behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.layout import Coordinates, LocalTensor, split, stacked, vocabulary, whole

_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


class Qwen3:
    """The map for one Qwen3 config, dense (`qwen3`) or mixture of experts (`qwen3_moe`, every layer sparse)."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        missing = [key for key in _REQUIRED if hf.get(key) is None]
        if missing:
            raise ModelError(f"the HF config of model_type {hf.get('model_type')} lacks {', '.join(missing)}")
        self.hf = hf
        self.is_moe = hf["model_type"] == "qwen3_moe"
        self.architecture = "Qwen3MoeForCausalLM" if self.is_moe else "Qwen3ForCausalLM"
        self.num_layers = int(hf["num_hidden_layers"])
        self.hidden = int(hf["hidden_size"])
        self.heads = int(hf["num_attention_heads"])
        self.groups = int(hf["num_key_value_heads"])
        self.head_dim = int(hf.get("head_dim") or self.hidden // self.heads)
        self.vocab_size = int(hf["vocab_size"])
        self.tied = bool(hf.get("tie_word_embeddings", False))
        self.num_experts = int(hf["num_experts"]) if self.is_moe else 0
        self.ffn = int(hf["moe_intermediate_size"] if self.is_moe else hf["intermediate_size"])
        if self.is_moe and (hf.get("mlp_only_layers") or int(hf.get("decoder_sparse_step", 1)) != 1):
            raise ModelError("qwen3_moe with dense layers in between (mlp_only_layers, decoder_sparse_step) has no parameter map yet")

    # ---- Megatron configuration -------------------------------------------------------------------------------------------------------

    def megatron_config(self) -> dict[str, Any]:
        """Keyword arguments of TransformerConfig."""
        config: dict[str, Any] = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": int(self.hf.get("intermediate_size") or self.ffn),
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(self.hf.get("rms_norm_eps", 1e-6)),
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "qk_layernorm": True,
        }
        if self.is_moe:
            config |= {
                "num_moe_experts": self.num_experts,
                "moe_router_topk": int(self.hf["num_experts_per_tok"]),
                "moe_ffn_hidden_size": self.ffn,
                "moe_router_load_balancing_type": "none",
                "moe_router_dtype": "fp32",
                # norm_topk_prob renormalises the chosen probabilities, which equals a softmax over the chosen logits alone
                "moe_router_pre_softmax": not self.hf.get("norm_topk_prob", False),
            }
        return config

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of GPTModel."""
        theta = self.hf.get("rope_theta") or (self.hf.get("rope_parameters") or {}).get("rope_theta") or 10000.0
        return {
            "position_embedding_type": "rope",
            "rotary_base": int(theta),
            "share_embeddings_and_output_weights": self.tied,
            "max_sequence_length": int(self.hf.get("max_position_embeddings", 32768)),
        }

    # ---- the checkpoint ---------------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every HF tensor with its shape."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden)}
        for layer in range(self.num_layers):
            shapes |= self._layer_tensors(f"model.layers.{layer}.")
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden)
        return shapes

    def _layer_tensors(self, prefix: str) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * self.head_dim, self.groups * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}input_layernorm.weight": (self.hidden,),
            f"{prefix}self_attn.q_proj.weight": (q, self.hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, self.hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, self.hidden),
            f"{prefix}self_attn.o_proj.weight": (self.hidden, q),
            f"{prefix}self_attn.q_norm.weight": (self.head_dim,),
            f"{prefix}self_attn.k_norm.weight": (self.head_dim,),
            f"{prefix}post_attention_layernorm.weight": (self.hidden,),
        }
        mlps = [f"{prefix}mlp.experts.{e}." for e in range(self.num_experts)] if self.is_moe else [f"{prefix}mlp."]
        if self.is_moe:
            shapes[f"{prefix}mlp.gate.weight"] = (self.num_experts, self.hidden)
        for mlp in mlps:
            shapes[f"{mlp}gate_proj.weight"] = (self.ffn, self.hidden)
            shapes[f"{mlp}up_proj.weight"] = (self.ffn, self.hidden)
            shapes[f"{mlp}down_proj.weight"] = (self.hidden, self.ffn)
        return shapes

    # ---- the cut ----------------------------------------------------------------------------------------------------------------------

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """The parameters of the rank at `at`."""
        self._check_divides(at)
        tensors: list[LocalTensor] = []
        if at.is_first_stage:
            tensors.append(self._vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight", at))
        for local, layer in enumerate(at.layers(self.num_layers)):
            source, target = f"model.layers.{layer}.", f"decoder.layers.{local}."
            tensors += self._attention(source, target, at)
            tensors += self._experts(source, target, at) if self.is_moe else self._dense_mlp(source, target, at)
        if at.is_last_stage:
            tensors.append(whole("decoder.final_layernorm.weight", "model.norm.weight", (self.hidden,)))
            if not self.tied:
                tensors.append(self._vocab("output_layer.weight", "lm_head.weight", at))
            elif not at.is_first_stage:
                tensors.append(self._vocab("output_layer.weight", "model.embed_tokens.weight", at))
        return tensors

    def _check_divides(self, at: Coordinates) -> None:
        rules = [
            ("num_hidden_layers", self.num_layers, "actor.parallel.pipeline", at.pp_size),
            ("num_attention_heads", self.heads, "actor.parallel.tensor", at.tp_size),
            ("num_key_value_heads", self.groups, "actor.parallel.tensor", at.tp_size),
            ("moe_intermediate_size", self.ffn, "the expert tensor parallel size", at.etp_size if self.is_moe else at.tp_size),
        ]
        if self.is_moe:
            rules.append(("num_experts", self.num_experts, "actor.parallel.expert", at.ep_size))
        for field, value, key, size in rules:
            if value % size:
                raise ModelError(f"{field} is {value}, which {key} {size} does not divide; choose a divisor of {value}")

    def _vocab(self, name: str, source: str, at: Coordinates) -> LocalTensor:
        return vocabulary(name, source, self.vocab_size, self.hidden, at.tp_rank, at.tp_size)

    def _attention(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        per_rank, q_rows = self.groups // at.tp_size, self.heads // self.groups * self.head_dim
        rows: list[tuple[str, int, int]] = []
        for group in range(at.tp_rank * per_rank, (at.tp_rank + 1) * per_rank):
            rows.append((f"{source}self_attn.q_proj.weight", group * q_rows, q_rows))
            rows.append((f"{source}self_attn.k_proj.weight", group * self.head_dim, self.head_dim))
            rows.append((f"{source}self_attn.v_proj.weight", group * self.head_dim, self.head_dim))
        attention, out = f"{target}self_attention.", self.heads * self.head_dim
        return [
            whole(f"{attention}linear_qkv.layer_norm_weight", f"{source}input_layernorm.weight", (self.hidden,)),
            stacked(f"{attention}linear_qkv.weight", rows, (self.hidden,)),
            whole(f"{attention}q_layernorm.weight", f"{source}self_attn.q_norm.weight", (self.head_dim,)),
            whole(f"{attention}k_layernorm.weight", f"{source}self_attn.k_norm.weight", (self.head_dim,)),
            split(f"{attention}linear_proj.weight", f"{source}self_attn.o_proj.weight", (self.hidden, out), 1, at.tp_rank, at.tp_size),
        ]

    def _gated(self, fc1: str, fc2: str, source: str, rank: int, size: int) -> list[LocalTensor]:
        rows = self.ffn // size
        parts = [(f"{source}{proj}.weight", rank * rows, rows) for proj in ("gate_proj", "up_proj")]
        return [
            stacked(fc1, parts, (self.hidden,)),
            split(fc2, f"{source}down_proj.weight", (self.hidden, self.ffn), 1, rank, size),
        ]

    def _dense_mlp(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        mlp = f"{target}mlp."
        norm = whole(f"{mlp}linear_fc1.layer_norm_weight", f"{source}post_attention_layernorm.weight", (self.hidden,))
        return [norm, *self._gated(f"{mlp}linear_fc1.weight", f"{mlp}linear_fc2.weight", f"{source}mlp.", at.tp_rank, at.tp_size)]

    def _experts(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        mlp, share = f"{target}mlp.", self.num_experts // at.ep_size
        tensors = [
            whole(f"{target}pre_mlp_layernorm.weight", f"{source}post_attention_layernorm.weight", (self.hidden,)),
            whole(f"{mlp}router.weight", f"{source}mlp.gate.weight", (self.num_experts, self.hidden)),
        ]
        for local in range(share):
            expert = f"{source}mlp.experts.{at.ep_rank * share + local}."
            fc1, fc2 = f"{mlp}experts.linear_fc1.weight{local}", f"{mlp}experts.linear_fc2.weight{local}"
            tensors += self._gated(fc1, fc2, expert, at.etp_rank, at.etp_size)
        return tensors
