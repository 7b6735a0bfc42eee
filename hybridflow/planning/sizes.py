"""How many numbers a rank holds, and what a token costs in each layer, from the parameter maps that
a run uses.

Layers with equal blocks are counted once, so that a model of 10^12 parameters takes milliseconds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.blocks import Block, DenseMlp, Experts, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.layout import Coordinates, LocalTensor
from hybridflow.models.mla import LatentAttention

EXPERTS = ".mlp.experts."  # as `mcore.model.mark_experts` tells routed experts from the rest


@dataclass(frozen=True)
class Numbers:
    """Parameters of a rank: routed experts, and the rest."""

    dense: int = 0
    expert: int = 0

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(self.dense + other.dense, self.expert + other.expert)

    @property
    def total(self) -> int:
        """Both together."""
        return self.dense + self.expert


def decoder_of(hf: Mapping[str, Any], mtp: bool = False) -> Decoder:
    """The model of a config.

    Raises:
        ModelError: it has no parameter map, or one that is not built from blocks.
    """
    family = family_of({"vocab_size": 1, **hf}, mtp=mtp)
    if not isinstance(family, Decoder):
        raise ModelError(
            f"no plan can be made for model_type {hf.get('model_type')!r}: it is not built from "
            "blocks"
        )
    return family


def chunk_layers(decoder: Decoder, at: Coordinates) -> range:
    """The layers of the virtual stage at `at`: those that Megatron gives it, and where they do not
    divide evenly and no stage's number is given, which the trainer refuses and other systems allow,
    the nearest even share."""
    if not at.is_even:
        return at.layers(decoder.num_layers)
    number = at.vpp_rank * at.pp_size + at.pp_rank
    chunks = at.pp_size * at.vpp_size
    first, last = (round(decoder.num_layers * index / chunks) for index in (number, number + 1))
    return range(first, last)


@functools.lru_cache(maxsize=64)
def layer_kinds(decoder: Decoder) -> tuple[tuple[int, ...], tuple[tuple[Block, Block], ...]]:
    """(the kind of each layer, attention and MLP of each kind)."""
    numbers: dict[tuple[Block, Block], int] = {}
    of = (
        numbers.setdefault((decoder.attention(n), decoder.mlp(n)), len(numbers))
        for n in range(decoder.num_layers)
    )
    return tuple(of), tuple(numbers)


def _stage_kinds(decoder: Decoder, at: Coordinates) -> Counter[int]:
    """How many layers of each kind the pipeline stage at `at` holds, all its virtual stages
    together."""
    kinds, _ = layer_kinds(decoder)
    return Counter(
        kinds[layer] for chunk in at.virtual_stages() for layer in chunk_layers(decoder, chunk)
    )


@functools.lru_cache(maxsize=4096)
def stage_layers(decoder: Decoder, at: Coordinates) -> tuple[tuple[LayerShape, int], ...]:
    """The layers of the pipeline stage at `at`: each shape, and how many there are of it."""
    shapes = _kind_shapes(decoder)
    return tuple((shapes[kind], count) for kind, count in _stage_kinds(decoder, at).items())


@functools.lru_cache(maxsize=4096)
def stage_numbers(decoder: Decoder, at: Coordinates, scalar_head: bool = False) -> Numbers:
    """What the pipeline stage at `at` holds, all its virtual stages together.

    Args:
        scalar_head: a critic or reward model, which has [1, h] in place of the output layer.
    """
    total = Numbers()
    cut = _cut(at)
    _, blocks = layer_kinds(decoder)
    for kind, count in _stage_kinds(decoder, at).items():
        attention, mlp = blocks[kind]
        each = block_numbers(attention, cut) + block_numbers(mlp, cut)
        total += Numbers(count * each.dense, count * each.expert)
    for chunk in at.virtual_stages():
        for local in (*decoder.first_tensors(chunk), *decoder.last_tensors(chunk)):
            if not (scalar_head and local.name == "output_layer.weight"):
                total += _numbers([local])
        if scalar_head and chunk.is_last_stage:
            total += Numbers(decoder.hidden)
    return total


def _cut(at: Coordinates) -> Coordinates:
    """The part of a rank's place that a block depends on."""
    return Coordinates(tp_size=at.tp_size, ep_size=at.ep_size, etp_size=at.etp_size)


@functools.cache
def block_numbers(block: Block, cut: Coordinates) -> Numbers:
    """What the first rank of a cut holds of a block; cuts are even, so every rank holds as much."""
    return _numbers(block.local("", "", cut))


def _numbers(tensors: list[LocalTensor]) -> Numbers:
    found = Numbers()
    for local in tensors:
        if not local.is_buffer:
            count = prod(local.shape)
            found += Numbers(expert=count) if EXPERTS in f".{local.name}" else Numbers(count)
    return found


@dataclass(frozen=True)
class Product:
    """A matrix product of a block: every token visits `copies` matrices of `rows` x `columns`;
    experts or not."""

    rows: int
    columns: int
    copies: int = 1
    is_expert: bool = False

    @property
    def flops(self) -> int:
        """Operations a token, forward."""
        return 2 * self.rows * self.columns * self.copies


@functools.cache
def products(block: Block, topk: int) -> tuple[Product, ...]:
    """The matrix products of a block, read from the shapes of its tensors; of the routed experts a
    token visits `topk`."""
    found: list[Product] = []
    for name, shape in block.tensors("").items():
        if len(shape) != 2:
            continue
        if ".experts.0." in f".{name}":
            found.append(Product(*shape, topk, True))
        elif ".experts." not in f".{name}":
            found.append(Product(*shape))
    return tuple(found)


@dataclass(frozen=True)
class LayerShape:
    """What the planner asks of a layer besides its parameters; numbers are of a token.

    Attributes:
        attention, mlp: matrix products.
        core: operations for each pair of query and key, forward.
        kv: numbers in the KV cache.
        heads: activations that tensor parallelism divides: queries, keys, values and attention's
            output.
        expanded: those of `heads` that the up projections of latent attention make. core_output:
            attention's output.
        low_rank: activations of the latents, whole on every tensor rank.
        ffn: columns of the dense MLP or the shared experts. routed_ffn: of all routed experts that
            a token visits.
        experts, topk: 0 for a dense layer.
    """

    hidden: int
    attention: tuple[Product, ...]
    mlp: tuple[Product, ...]
    core: int
    kv: int
    heads: int
    expanded: int
    core_output: int
    low_rank: int
    ffn: int
    routed_ffn: int
    experts: int
    topk: int


def layer_shapes(decoder: Decoder) -> list[LayerShape]:
    """One for each layer, in order; equal layers are the same object."""
    shapes = _kind_shapes(decoder)
    return [shapes[kind] for kind in layer_kinds(decoder)[0]]


def _kind_shapes(decoder: Decoder) -> list[LayerShape]:
    topk = int(decoder.values.get("num_experts_per_tok") or 0)
    found: list[LayerShape] = []
    for attention, mlp in layer_kinds(decoder)[1]:
        found.append(layer_shape(attention, mlp, decoder.hidden, topk))
    return found


@functools.cache
def layer_shape(attention: Block, mlp: Block, hidden: int, topk: int) -> LayerShape:
    """The figures of a layer of these two blocks.

    Raises:
        ModelError: a kind of block that is not known here.
    """
    if isinstance(mlp, DenseMlp):
        experts = 0
        routed = 0
        ffn = mlp.ffn
        expert_ffn = 0
    elif isinstance(mlp, Experts):
        experts = mlp.num_experts
        routed = topk
        ffn = mlp.shared_ffn
        expert_ffn = mlp.ffn
    else:
        raise ModelError(f"no plan can be made for an MLP of kind {type(mlp).__name__}")
    return LayerShape(
        hidden=hidden,
        attention=products(attention, topk),
        mlp=products(mlp, topk),
        **_attention_shape(attention),
        ffn=ffn,
        routed_ffn=routed * expert_ffn,
        experts=experts,
        topk=routed,
    )


def _attention_shape(block: Block) -> dict[str, int]:
    if isinstance(block, GroupedAttention):
        query = block.heads * block.head_dim
        key = block.groups * block.head_dim
        before_norm = query + key if block.qk_norm else 0
        heads = query + 2 * key + before_norm + query
        return {
            **{"core": 4 * query, "kv": 2 * key, "heads": heads},
            **{"expanded": 0, "core_output": query, "low_rank": 0},
        }
    if isinstance(block, LatentAttention):
        query = block.heads * (block.nope_dim + block.rope_dim)
        value = block.heads * block.v_dim
        low_rank = 2 * ((block.q_rank or 0) + block.kv_rank) + block.rope_dim
        return {
            **{
                "core": 2 * (query + value),
                "kv": block.kv_rank + block.rope_dim,
                "heads": 2 * query + 2 * value,
            },
            **{"expanded": 2 * query + value, "core_output": value, "low_rank": low_rank},
        }
    raise ModelError(f"no plan can be made for attention of kind {type(block).__name__}")
