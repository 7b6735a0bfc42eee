"""Gated delta net (arXiv 2412.06464): linear attention with one state matrix per value head. Each
key head serves `value_heads / key_heads` value heads. The rows of Megatron's `in_proj` are grouped
by key head: [query, key, values, betas, decays, gates] for each. The convolution has one row per
query, key and value row, in the same order. Tensor parallelism therefore splits both into equal
shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.config.schema import ParallelConfig
from hybridflow.errors import ModelError
from hybridflow.models.blocks import TENSOR, Division, Shapes
from hybridflow.models.family import Family
from hybridflow.models.layout import Coordinates, LocalTensor, split, stacked_rows, whole
from hybridflow.models.windows import FULL

LINEAR = "linear_attention"


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net, including the preceding `input_layernorm`.

    `key_dim` and `value_dim` are head sizes, and `kernel` is the number of tokens that the
    convolution reads. `fused` selects the checkpoint's projections: Qwen3-Next has two, which are
    interleaved by key head; Qwen3.5 has four, which are not.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool

    @property
    def ratio(self) -> int:
        """Number of value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def values(self) -> int:
        """Number of value elements per key head."""
        return self.ratio * self.value_dim

    @property
    def mixed(self) -> int:
        """Number of rows per key head that pass through the convolution: query, key and values."""
        return 2 * self.key_dim + self.values

    @property
    def rows(self) -> int:
        """Number of rows per key head in `in_proj`."""
        return self.mixed + 2 * self.ratio + self.values

    def tensors(self, source: str) -> Shapes:
        """Return the HF tensors of the preceding norm, the projections, the convolution, the decay
        parameters and the head norm."""
        hf = f"{source}linear_attn."
        keys = self.key_heads * self.key_dim
        values = self.key_heads * self.values
        heads = self.value_heads
        names = (
            {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
            if self.fused
            else {
                "in_proj_qkv": 2 * keys + values,
                "in_proj_z": values,
                "in_proj_b": heads,
                "in_proj_a": heads,
            }
        )
        return {
            f"{source}input_layernorm.weight": (self.hidden,),
            **{f"{hf}{name}.weight": (rows, self.hidden) for name, rows in names.items()},
            f"{hf}conv1d.weight": (2 * keys + values, 1, self.kernel),
            f"{hf}dt_bias": (heads,),
            f"{hf}A_log": (heads,),
            f"{hf}norm.weight": (self.value_dim,),
            f"{hf}out_proj.weight": (self.hidden, values),
        }

    def local(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        """Return the parameters of this rank's heads, and the full norms."""
        hf = f"{source}linear_attn."
        mine = f"{target}self_attention."
        heads = (self.value_heads,)
        out = (self.hidden, self.key_heads * self.values)
        rank = at.tp_rank
        size = at.tp_size
        norm = f"{source}input_layernorm.weight"
        conv = f"{hf}conv1d.weight"
        conv_rows = [
            part for head in range(self.key_heads) for part in self._mixed_parts(conv, head)
        ]
        rows = [part for head in range(self.key_heads) for part in self._parts(hf, head)]
        return [
            whole(f"{mine}in_proj.layer_norm_weight", norm, (self.hidden,)),
            stacked_rows(f"{mine}in_proj.weight", rows, (self.hidden,), rank, size),
            stacked_rows(f"{mine}conv1d.weight", conv_rows, (1, self.kernel), rank, size),
            split(f"{mine}dt_bias", f"{hf}dt_bias", heads, 0, rank, size),
            split(f"{mine}A_log", f"{hf}A_log", heads, 0, rank, size),
            whole(f"{mine}out_norm.weight", f"{hf}norm.weight", (self.value_dim,)),
            split(f"{mine}out_proj.weight", f"{hf}out_proj.weight", out, 1, rank, size),
        ]

    def divisions(self, at: Coordinates) -> list[Division]:
        """Require the number of key heads to be divisible by the tensor parallel size."""
        return [("linear_num_key_heads", self.key_heads, TENSOR, at.tp_size)]

    def _mixed_parts(self, tensor: str, head: int) -> list[tuple[str, int, int]]:
        """Return a key head's rows in an HF tensor that stacks all queries, then all keys, then all
        values.
        """
        keys = self.key_heads * self.key_dim
        return [
            (tensor, head * self.key_dim, self.key_dim),
            (tensor, keys + head * self.key_dim, self.key_dim),
            (tensor, 2 * keys + head * self.values, self.values),
        ]

    def _parts(self, hf: str, head: int) -> list[tuple[str, int, int]]:
        """Return the HF rows that make up a key head's share of `in_proj`."""
        if self.fused:
            first = head * (self.mixed + self.values)
            qkvz = f"{hf}in_proj_qkvz.weight"
            return [
                (qkvz, first, self.mixed),
                (f"{hf}in_proj_ba.weight", head * 2 * self.ratio, 2 * self.ratio),
                (qkvz, first + self.mixed, self.values),
            ]
        return [
            *self._mixed_parts(f"{hf}in_proj_qkv.weight", head),
            (f"{hf}in_proj_b.weight", head * self.ratio, self.ratio),
            (f"{hf}in_proj_a.weight", head * self.ratio, self.ratio),
            (f"{hf}in_proj_z.weight", head * self.values, self.values),
        ]


def linear_layers(kinds: Sequence[str] | None, interval: int, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have a delta net instead of attention.

    Args:
        kinds: `layer_types` from config.json.
        interval: `full_attention_interval`; without `layer_types`, every `interval`-th layer has
            attention.

    Raises:
        ModelError: the length of `layer_types` differs from the number of layers, or it contains an
            unknown kind.
    """
    if kinds is None:
        if interval < 1:
            raise ModelError(f"full_attention_interval={interval} is not supported; set it to 4")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise ModelError(
            f"layer_types={list(kinds)} is not supported: it must have one entry, {LINEAR} or "
            f"{FULL}, per layer (num_hidden_layers={num_layers})"
        )
    return tuple(kind == LINEAR for kind in kinds)


def has_delta_net(family: Family) -> bool:
    """Return True if any layer of the model has a gated delta net."""
    decoder = getattr(family, "backbone", family)  # unwraps a scalar head
    return any(getattr(decoder, "linear", ()))


def check_context(family: Family, parallel: ParallelConfig) -> None:
    """Raise ModelError if the context parallel size exceeds the number of key heads per
    tensor-parallel rank. The delta net redistributes its heads across the context-parallel ranks.
    """
    if parallel.context == 1 or not has_delta_net(family):
        return
    heads = int(family.hf["linear_num_key_heads"]) // parallel.tensor
    if parallel.context > heads:
        raise ModelError(
            f"actor.parallel.context={parallel.context} exceeds the {heads} key heads per tensor "
            "rank of the gated delta net (linear_num_key_heads / actor.parallel.tensor); reduce "
            "one of them"
        )
