"""Building blocks of decoder layers: their tensors in a checkpoint and their sharding across
Megatron ranks.

Every block has three methods. `tensors(source)` returns the names and shapes of the HF tensors
under the layer's prefix, `local(source, target, at)` returns a rank's parameters, and
`divisions(at)` returns the divisibility requirements. Megatron names follow the Transformer Engine
layer spec (`models/gpt/gpt_layer_specs.py` of Megatron-Core 0.16): the norm before a dense linear
is a parameter of that linear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from hybridflow.models.layout import Coordinates, LocalTensor, split, stacked, stacked_rows, whole

Shapes = dict[str, tuple[int, ...]]
# (HF field, its value, configuration key of the size, size): the value must be a multiple of the
# size
Division = tuple[str, int, str, int]

TENSOR = "actor.parallel.tensor"
EXPERT = "actor.parallel.expert"


class Block(Protocol):
    """One part of a decoder layer, such as its attention or MLP."""

    def tensors(self, source: str) -> Shapes:
        """Return the HF tensor names and shapes under the layer's prefix `source`
        ("model.layers.3.")."""

    def local(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        """Return the local tensors of the rank at coordinates `at`. `target` is the layer's
        Megatron prefix ("decoder.layers.0.")."""

    def divisions(self, at: Coordinates) -> list[Division]:
        """Return the divisibility requirements of this sharding."""

    def __hash__(self) -> int:
        """Return a hash by value, so that equal blocks are counted only once."""


@dataclass(frozen=True)
class Norms:
    """Checkpoint names of the norms on a block's input (`before`) and output (`after`). An empty
    name means that the block has no such norm."""

    before: str
    after: str = ""

    def tensors(self, source: str, hidden: int) -> Shapes:
        """Return the norms' HF names and shapes under the layer's prefix `source`."""
        return {f"{source}{name}.weight": (hidden,) for name in (self.before, self.after) if name}

    def local(self, before: str, after: str, source: str, hidden: int) -> list[LocalTensor]:
        """Return the norm weights under the Megatron names `before` and `after`."""
        pairs = ((before, self.before), (after, self.after))
        return [
            whole(target, f"{source}{name}.weight", (hidden,)) for target, name in pairs if name
        ]


@dataclass(frozen=True)
class GroupedAttention:
    """Grouped-query attention, including its norms.

    `linear_qkv` interleaves by KV group: [query heads of the group, key, value] for each group, and
    ranks take equal shares of these rows. With fewer groups than ranks, groups are split as well,
    as in Megatron (`get_query_key_value_tensors`). `qk_norm` normalises each query and key head;
    with `wide_norm`, one norm spans all query heads and another all key heads, and every rank has
    their full weights (`mcore.layers`). `sinks` adds one logit per head to each softmax.
    `output_gate` scales each head's output by the sigmoid of a second projection. Its rows follow
    each head's query rows in the checkpoint; `linear_qkv` stores all queries of a group first, then
    the group's gates.
    """

    hidden: int
    heads: int
    groups: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    wide_norm: bool = False
    out_bias: bool = False
    sinks: bool = False
    output_gate: bool = False
    norms: Norms = Norms("input_layernorm")

    def tensors(self, source: str) -> Shapes:
        """Return the HF tensors of the norm and the four projections, plus biases and head norms if
        the family uses them."""
        q = self.heads * self.head_dim
        kv = self.groups * self.head_dim
        attention = f"{source}self_attn."
        shapes = self.norms.tensors(source, self.hidden)
        for name, rows in (("q", q * (1 + self.output_gate)), ("k", kv), ("v", kv)):
            shapes[f"{attention}{name}_proj.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        shapes[f"{attention}o_proj.weight"] = (self.hidden, q)
        if self.out_bias:
            shapes[f"{attention}o_proj.bias"] = (self.hidden,)
        if self.sinks:
            shapes[f"{attention}sinks"] = (self.heads,)
        for name, width in self.norm_widths().items():
            shapes[f"{attention}{name}_norm.weight"] = (width,)
        return shapes

    def norm_widths(self) -> dict[str, int]:
        """Return {"q": width of the query norm, "k": width of the key norm}, or {} if there are
        none."""
        if not self.qk_norm:
            return {}
        heads = (self.heads, self.groups) if self.wide_norm else (1, 1)
        return dict(zip("qk", (count * self.head_dim for count in heads), strict=True))

    def local(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        """Return the rank's fused QKV projection (split by rows) and its output projection (split
        by columns)."""
        hf = f"{source}self_attn."
        mine = f"{target}self_attention."
        out = self.heads * self.head_dim
        tensors = [
            *self.norms.local(
                f"{mine}linear_qkv.layer_norm_weight",
                f"{target}post_self_attn_layernorm.weight",
                source,
                self.hidden,
            ),
            stacked_rows(
                f"{mine}linear_qkv.weight",
                self._interleaved(hf, "weight"),
                (self.hidden,),
                at.tp_rank,
                at.tp_size,
            ),
        ]
        if self.qkv_bias:
            tensors.append(
                stacked_rows(
                    f"{mine}linear_qkv.bias",
                    self._interleaved(hf, "bias"),
                    (),
                    at.tp_rank,
                    at.tp_size,
                )
            )
        for name, width in self.norm_widths().items():
            tensors.append(
                whole(f"{mine}{name}_layernorm.weight", f"{hf}{name}_norm.weight", (width,))
            )
        tensors.append(
            split(
                f"{mine}linear_proj.weight",
                f"{hf}o_proj.weight",
                (self.hidden, out),
                1,
                at.tp_rank,
                at.tp_size,
            )
        )
        if self.out_bias:
            tensors.append(whole(f"{mine}linear_proj.bias", f"{hf}o_proj.bias", (self.hidden,)))
        if self.sinks:
            name = f"{mine}core_attention.softmax_offset"
            tensors.append(split(name, f"{hf}sinks", (self.heads,), 0, at.tp_rank, at.tp_size))
        return tensors

    def divisions(self, at: Coordinates) -> list[Division]:
        """Require the numbers of heads and KV groups to be divisible by the tensor parallel size.

        With fewer groups than ranks, the size must be a multiple of the number of groups instead.
        """
        divisions: list[Division] = [("num_attention_heads", self.heads, TENSOR, at.tp_size)]
        if self.groups >= at.tp_size:
            divisions.append(("num_key_value_heads", self.groups, TENSOR, at.tp_size))
        else:
            divisions.append((TENSOR, at.tp_size, "num_key_value_heads", self.groups))
            rows = ((1 + self.output_gate) * self.heads + 2 * self.groups) * self.head_dim
            divisions.append(("the rows of q, k and v", rows, TENSOR, at.tp_size))
        return divisions

    def _interleaved(self, hf: str, kind: str) -> list[tuple[str, int, int]]:
        q_rows = self.heads // self.groups * self.head_dim
        parts = []
        for group in range(self.groups):
            if self.output_gate:
                parts += self._gated_queries(f"{hf}q_proj.{kind}", group)
            else:
                parts.append((f"{hf}q_proj.{kind}", group * q_rows, q_rows))
            parts.append((f"{hf}k_proj.{kind}", group * self.head_dim, self.head_dim))
            parts.append((f"{hf}v_proj.{kind}", group * self.head_dim, self.head_dim))
        return parts

    def _gated_queries(self, tensor: str, group: int) -> list[tuple[str, int, int]]:
        """Return the checkpoint rows of a group's queries, followed by those of its gates. In the
        checkpoint, each head's gate follows its query."""
        many = self.heads // self.groups
        heads = range(group * many, (group + 1) * many)
        return [
            (tensor, (2 * head + gate) * self.head_dim, self.head_dim)
            for gate in (0, 1)
            for head in heads
        ]


@dataclass(frozen=True)
class MlpNames:
    """Checkpoint names of a gated MLP's three matrices. If gate and up have the same name, they are
    stored as one tensor, gate first."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def rows(self, source: str, ffn: int, first: int, rows: int) -> list[tuple[str, int, int]]:
        """Return rows `first` to `first + rows` of gate and up, in the format of the `parts`
        argument of `stacked`."""
        up = first + ffn if self.up == self.gate else first
        return [
            (f"{source}{self.gate}.weight", first, rows),
            (f"{source}{self.up}.weight", up, rows),
        ]


def gated_tensors(source: str, hidden: int, ffn: int, names: MlpNames) -> Shapes:
    """Return the HF tensors of a gated MLP under the prefix `source`."""
    rows = 2 * ffn if names.up == names.gate else ffn
    return {
        f"{source}{names.gate}.weight": (rows, hidden),
        f"{source}{names.up}.weight": (rows, hidden),
        f"{source}{names.down}.weight": (hidden, ffn),
    }


def gated_local(
    fc1: str, fc2: str, source: str, hidden: int, ffn: int, names: MlpNames, rank: int, size: int
) -> list[LocalTensor]:
    """Return a rank's `fc1` (its rows of gate stacked on its rows of up) and `fc2` (its columns of
    down)."""
    rows = ffn // size
    return [
        stacked(fc1, names.rows(source, ffn, rank * rows, rows), (hidden,)),
        split(fc2, f"{source}{names.down}.weight", (hidden, ffn), 1, rank, size),
    ]


@dataclass(frozen=True)
class DenseMlp:
    """A gated MLP, including its norms."""

    hidden: int
    ffn: int
    prefix: str = "mlp."
    names: MlpNames = MlpNames()
    norms: Norms = Norms("post_attention_layernorm")

    def tensors(self, source: str) -> Shapes:
        """Return the HF tensors of the norms and of the gate, up and down projections."""
        norms = self.norms.tensors(source, self.hidden)
        return norms | gated_tensors(f"{source}{self.prefix}", self.hidden, self.ffn, self.names)

    def local(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        """Return the rank's stacked gate and up projections (split by rows) and its down projection
        (split by columns)."""
        fc1 = f"{target}mlp.linear_fc1."
        fc2 = f"{target}mlp.linear_fc2.weight"
        hf = f"{source}{self.prefix}"
        return [
            *self.norms.local(
                f"{fc1}layer_norm_weight",
                f"{target}post_mlp_layernorm.weight",
                source,
                self.hidden,
            ),
            *gated_local(
                f"{fc1}weight", fc2, hf, self.hidden, self.ffn, self.names, at.tp_rank, at.tp_size
            ),
        ]

    def divisions(self, at: Coordinates) -> list[Division]:
        """Require the intermediate size to be divisible by the tensor parallel size."""
        return [("intermediate_size", self.ffn, TENSOR, at.tp_size)]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: router, routed experts and optional shared experts.

    Includes the preceding `post_attention_layernorm`. Routed experts are sharded by expert
    parallelism and expert tensor parallelism, shared experts by regular tensor parallelism
    (`moe/shared_experts.py`). `expert_bias` is the score correction of loss-free balancing, an fp32
    buffer in Megatron. `grouped` selects Megatron's names: grouped GEMM
    (`experts.linear_fc1.weight3`) or one module per expert (`experts.local_experts.3`). `shared` is
    the checkpoint's name of the shared experts; with `shared_gate` their output is scaled by the
    sigmoid of a projection of the hidden state. `bias` is the checkpoint's name of `expert_bias`,
    and `bias_shape` its shape if that is not [experts]. `keys` are the family's config keys for
    `ffn` and `num_experts`, used in messages.
    """

    hidden: int
    ffn: int
    num_experts: int
    shared_ffn: int = 0
    shared: str = "shared_experts"
    shared_gate: bool = False
    expert_bias: bool = False
    bias: str = "gate.e_score_correction_bias"
    bias_shape: tuple[int, ...] = ()
    prefix: str = "mlp."
    names: MlpNames = MlpNames()
    grouped: bool = True
    keys: tuple[str, str] = ("moe_intermediate_size", "num_experts")

    def tensors(self, source: str) -> Shapes:
        """Return the HF tensors of the norm, the router and its bias, and the routed and shared
        experts."""
        hf = f"{source}{self.prefix}"
        shapes: Shapes = {
            f"{source}post_attention_layernorm.weight": (self.hidden,),
            f"{hf}gate.weight": (self.num_experts, self.hidden),
        }
        if self.expert_bias:
            shapes[f"{hf}{self.bias}"] = self.bias_shape or (self.num_experts,)
        for expert in range(self.num_experts):
            shapes |= gated_tensors(f"{hf}experts.{expert}.", self.hidden, self.ffn, self.names)
        if self.shared_ffn:
            shapes |= gated_tensors(f"{hf}{self.shared}.", self.hidden, self.shared_ffn, self.names)
        if self.shared_gate:
            shapes[f"{hf}{self.shared}_gate.weight"] = (1, self.hidden)
        return shapes

    def local(self, source: str, target: str, at: Coordinates) -> list[LocalTensor]:
        """Return the full router and this rank's share of the experts."""
        hf = f"{source}{self.prefix}"
        mlp = f"{target}mlp."
        tensors = [
            whole(
                f"{target}pre_mlp_layernorm.weight",
                f"{source}post_attention_layernorm.weight",
                (self.hidden,),
            ),
            whole(f"{mlp}router.weight", f"{hf}gate.weight", (self.num_experts, self.hidden)),
        ]
        if self.expert_bias:
            shape = self.bias_shape or (self.num_experts,)
            bias = whole(f"{mlp}router.expert_bias", f"{hf}{self.bias}", shape)
            tensors.append(replace(bias, dtype="float32", is_buffer=True))
        for local, number in enumerate(at.experts(self.num_experts)):
            fc1, fc2 = self._expert_names(mlp, local)
            expert = f"{hf}experts.{number}."
            tensors += gated_local(
                fc1, fc2, expert, self.hidden, self.ffn, self.names, at.etp_rank, at.etp_size
            )
        if self.shared_ffn:
            fc1 = f"{mlp}shared_experts.linear_fc1.weight"
            fc2 = f"{mlp}shared_experts.linear_fc2.weight"
            shared = f"{hf}{self.shared}."
            tensors += gated_local(
                fc1, fc2, shared, self.hidden, self.shared_ffn, self.names, at.tp_rank, at.tp_size
            )
        if self.shared_gate:
            gate = f"{hf}{self.shared}_gate.weight"
            tensors.append(whole(f"{mlp}shared_experts.gate_weight", gate, (1, self.hidden)))
        return tensors

    def divisions(self, at: Coordinates) -> list[Division]:
        """Require the number of experts to be divisible by the expert parallel size.

        The experts' intermediate sizes must be divisible by the respective tensor parallel size.
        """
        ffn, experts = self.keys
        divisions: list[Division] = [
            (ffn, self.ffn, "the expert tensor parallel size", at.etp_size),
            (experts, self.num_experts, EXPERT, at.ep_size),
        ]
        if self.shared_ffn:
            divisions.append(
                ("the shared experts' intermediate size", self.shared_ffn, TENSOR, at.tp_size)
            )
        return divisions

    def _expert_names(self, mlp: str, local: int) -> tuple[str, str]:
        if self.grouped:
            return (
                f"{mlp}experts.linear_fc1.weight{local}",
                f"{mlp}experts.linear_fc2.weight{local}",
            )
        return (
            f"{mlp}experts.local_experts.{local}.linear_fc1.weight",
            f"{mlp}experts.local_experts.{local}.linear_fc2.weight",
        )
