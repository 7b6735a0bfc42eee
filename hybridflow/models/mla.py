"""Multi-head latent attention (DeepSeek-V2/V3): queries, keys and values pass through low-rank
latents.

The down projections of the latents are replicated on every tensor-parallel rank
(`parallel_mode="duplicated"` in Megatron); the up projections are split by heads. A head's rows are
[no-position part, rotary part] in `q_b_proj` and [key, value] in `kv_b_proj`. Megatron keeps that
order and the interleaved rotary halves, so no rows are permuted
(`transformer/multi_latent_attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.models.blocks import TENSOR, Division, Shapes
from hybridflow.models.layout import Coordinates, LocalTensor, split, whole


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention, including the preceding `input_layernorm`.

    `q_rank` is None if queries have no latent (Moonlight, DeepSeek-V2-Lite).
    """

    hidden: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def tensors(self, source: str) -> Shapes:
        """Return the HF tensors of the norm, the latents' down and up projections with their norms,
        and the output projection."""
        hf = f"{source}self_attn."
        q = self.heads * (self.nope_dim + self.rope_dim)
        shapes: Shapes = {f"{source}input_layernorm.weight": (self.hidden,)}
        if self.q_rank is None:
            shapes[f"{hf}q_proj.weight"] = (q, self.hidden)
        else:
            shapes[f"{hf}q_a_proj.weight"] = (self.q_rank, self.hidden)
            shapes[f"{hf}q_a_layernorm.weight"] = (self.q_rank,)
            shapes[f"{hf}q_b_proj.weight"] = (q, self.q_rank)
        shapes[f"{hf}kv_a_proj_with_mqa.weight"] = (self.kv_rank + self.rope_dim, self.hidden)
        shapes[f"{hf}kv_a_layernorm.weight"] = (self.kv_rank,)
        shapes[f"{hf}kv_b_proj.weight"] = (self.heads * (self.nope_dim + self.v_dim), self.kv_rank)
        shapes[f"{hf}o_proj.weight"] = (self.hidden, self.heads * self.v_dim)
        return shapes

    def local(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        """Return the full down projections, and the up projections split by heads."""
        hf = f"{source}self_attn."
        mine = f"{target}self_attention."
        shapes = self.tensors(source)

        def full(name: str, tensor: str) -> LocalTensor:
            return whole(name, tensor, shapes[tensor])

        def cut(name: str, tensor: str, dim: int) -> LocalTensor:
            return split(name, tensor, shapes[tensor], dim, at.tp_rank, at.tp_size)

        tensors = [full(f"{target}input_layernorm.weight", f"{source}input_layernorm.weight")]
        if self.q_rank is None:
            tensors.append(cut(f"{mine}linear_q_proj.weight", f"{hf}q_proj.weight", 0))
        else:
            tensors.append(full(f"{mine}linear_q_down_proj.weight", f"{hf}q_a_proj.weight"))
            tensors.append(
                full(f"{mine}linear_q_up_proj.layer_norm_weight", f"{hf}q_a_layernorm.weight")
            )
            tensors.append(cut(f"{mine}linear_q_up_proj.weight", f"{hf}q_b_proj.weight", 0))
        return [
            *tensors,
            full(f"{mine}linear_kv_down_proj.weight", f"{hf}kv_a_proj_with_mqa.weight"),
            full(f"{mine}linear_kv_up_proj.layer_norm_weight", f"{hf}kv_a_layernorm.weight"),
            cut(f"{mine}linear_kv_up_proj.weight", f"{hf}kv_b_proj.weight", 0),
            cut(f"{mine}linear_proj.weight", f"{hf}o_proj.weight", 1),
        ]

    def divisions(self, at: Coordinates) -> list[Division]:
        """Require the number of heads to be divisible by the tensor parallel size."""
        return [("num_attention_heads", self.heads, TENSOR, at.tp_size)]
