"""Experts with biases, stored as one stacked tensor per matrix and layer (gpt-oss).

Weights are [experts, in, out]; the columns of gate and up are interleaved. The trainer's parameters
have the same layout (`mcore.fused_experts`), so a rank's share is a single rectangle.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.models.blocks import EXPERT, Division, Shapes
from hybridflow.models.layout import Coordinates, LocalTensor, Piece, whole


@dataclass(frozen=True)
class FusedExperts:
    """Routed experts and their router, both with biases, including the preceding
    `post_attention_layernorm`.

    Gate and up are clamped at `limit`, and the input to the gate's sigmoid is multiplied by
    `alpha`.
    """

    hidden: int
    ffn: int
    num_experts: int
    alpha: float
    limit: float
    prefix: str = "mlp."
    shared_ffn: int = 0  # there are no shared experts

    def tensors(self, source: str) -> Shapes:
        """Return the HF tensors of the norm, router and experts."""
        hf = f"{source}{self.prefix}"
        return {
            f"{source}post_attention_layernorm.weight": (self.hidden,),
            f"{hf}router.weight": (self.num_experts, self.hidden),
            f"{hf}router.bias": (self.num_experts,),
            f"{hf}experts.gate_up_proj": (self.num_experts, self.hidden, 2 * self.ffn),
            f"{hf}experts.gate_up_proj_bias": (self.num_experts, 2 * self.ffn),
            f"{hf}experts.down_proj": (self.num_experts, self.ffn, self.hidden),
            f"{hf}experts.down_proj_bias": (self.num_experts, self.hidden),
        }

    def local(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        """Return the full router and this rank's share of the experts."""
        hf = f"{source}{self.prefix}"
        mlp = f"{target}mlp."
        router = (self.num_experts, self.hidden)
        norm = f"{source}post_attention_layernorm.weight"
        return [
            whole(f"{target}pre_mlp_layernorm.weight", norm, (self.hidden,)),
            whole(f"{mlp}router.weight", f"{hf}router.weight", router),
            whole(f"{mlp}router.bias", f"{hf}router.bias", (self.num_experts,)),
            *self.shares(f"{hf}experts.", f"{mlp}experts.", at),
        ]

    def shares(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        """Return a rank's share of the experts: expert parallelism assigns whole experts to the
        rank, and expert tensor parallelism splits each of them."""
        wide = 2 * self.ffn
        held = at.experts(self.num_experts)
        found = []
        for name, shape, dim in (
            ("gate_up_proj", (self.num_experts, self.hidden, wide), 2),
            ("gate_up_proj_bias", (self.num_experts, wide), 1),
            ("down_proj", (self.num_experts, self.ffn, self.hidden), 1),
            ("down_proj_bias", (self.num_experts, self.hidden), None),
        ):
            local = list(shape)
            start = [0] * len(shape)
            local[0] = len(held)
            start[0] = held.start
            if dim is not None:
                local[dim] //= at.etp_size
                start[dim] = at.etp_rank * local[dim]
            piece = Piece(f"{source}{name}", tuple(start), (0,) * len(shape), tuple(local))
            found.append(LocalTensor(f"{target}{name}", tuple(local), (piece,)))
        return found

    def divisions(self, at: Coordinates) -> list[Division]:
        """Require the number of experts and their intermediate size to be divisible by their
        parallel sizes."""
        return [
            ("intermediate_size", self.ffn, "the expert tensor parallel size", at.etp_size),
            ("num_local_experts", self.num_experts, EXPERT, at.ep_size),
        ]
