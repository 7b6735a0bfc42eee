"""Parameter counts per rank and costs per token of each layer, computed from the same parameter
maps as in a run. Identical layers are computed only once, so a model with 10^12 parameters takes
milliseconds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from hybridflow.config.schema import LoraConfig
from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.blocks import Block, DenseMlp, Experts, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.delta_net import DeltaNet
from hybridflow.models.fused_experts import FusedExperts
from hybridflow.models.layout import Coordinates, LocalTensor
from hybridflow.models.lora_targets import is_adapted
from hybridflow.models.mla import LatentAttention

EXPERTS = ".mlp.experts."  # marks routed experts, as in `mcore.model.mark_experts`


@dataclass(frozen=True)
class Numbers:
    """A rank's parameter counts: routed experts, and everything else (dense)."""

    dense: int = 0
    expert: int = 0

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(self.dense + other.dense, self.expert + other.expert)

    @property
    def total(self) -> int:
        """Total number of parameters."""
        return self.dense + self.expert


def decoder_of(hf: Mapping[str, Any], mtp: bool = False) -> Decoder:
    """Return the decoder for a Hugging Face config.

    Raises:
        ModelError: the model has no parameter map, or one that is not built from blocks.
    """
    family = family_of({"vocab_size": 1, **hf}, mtp=mtp)
    if not isinstance(family, Decoder):
        raise ModelError(
            f"model_type {hf.get('model_type')!r} is not supported by the planner: it is not built "
            "from blocks"
        )
    return family


def chunk_layers(decoder: Decoder, at: Coordinates) -> range:
    """Return the layers of the virtual stage at `at`, as Megatron assigns them.

    If the layers do not divide evenly and no stage's layer count is set, return this stage's share
    of the most even split. The trainer rejects such layouts, but other systems allow them.
    """
    if not at.is_even:
        return at.layers(decoder.num_layers)
    number = at.vpp_rank * at.pp_size + at.pp_rank
    chunks = at.pp_size * at.vpp_size
    first, last = (round(decoder.num_layers * index / chunks) for index in (number, number + 1))
    return range(first, last)


@functools.lru_cache(maxsize=64)
def layer_kinds(
    decoder: Decoder,
) -> tuple[tuple[int, ...], tuple[tuple[Block, Block], ...], tuple[int, ...]]:
    """Return (kind of each layer, (attention, MLP) of each kind, window of each kind)."""
    numbers: dict[tuple[Block, Block, int], int] = {}
    of = []
    for layer in range(decoder.num_layers):
        window = decoder.windows[layer] if decoder.windows else 0
        kind = (decoder.attention(layer), decoder.mlp(layer), window)
        of.append(numbers.setdefault(kind, len(numbers)))
    blocks = tuple((attention, mlp) for attention, mlp, _ in numbers)
    return tuple(of), blocks, tuple(window for *_, window in numbers)


def _stage_kinds(decoder: Decoder, at: Coordinates) -> Counter[int]:
    """Count the layers of each kind in the pipeline stage at `at`, over all its virtual stages."""
    kinds, _, _ = layer_kinds(decoder)
    counts: Counter[int] = Counter()
    for chunk in at.virtual_stages():
        counts.update(kinds[layer] for layer in chunk_layers(decoder, chunk))
    return counts


@functools.lru_cache(maxsize=4096)
def stage_layers(decoder: Decoder, at: Coordinates) -> tuple[tuple[LayerShape, int], ...]:
    """Return (shape, number of layers) for each kind of layer in the pipeline stage at `at`."""
    shapes = _kind_shapes(decoder)
    return tuple((shapes[kind], count) for kind, count in _stage_kinds(decoder, at).items())


@functools.lru_cache(maxsize=4096)
def stage_numbers(decoder: Decoder, at: Coordinates, scalar_head: bool = False) -> Numbers:
    """Count the parameters of the pipeline stage at `at`, over all its virtual stages.

    Args:
        scalar_head: True for a critic or reward model, whose output layer is [1, h].
    """
    total = Numbers()
    cut = _cut(at)
    _, blocks, _ = layer_kinds(decoder)
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


@dataclass(frozen=True)
class AdapterNumbers:
    """A rank's parameter counts with low-rank adapters: their factors, and the weights that have
    adapters."""

    factors: Numbers = Numbers()
    adapted: Numbers = Numbers()


@functools.lru_cache(maxsize=4096)
def adapter_numbers(decoder: Decoder, at: Coordinates, lora: LoraConfig) -> AdapterNumbers:
    """Count the adapters of the pipeline stage at `at`, over all its virtual stages."""
    factors = adapted = Numbers()
    cut = _cut(at)
    _, blocks, _ = layer_kinds(decoder)
    for kind, count in _stage_kinds(decoder, at).items():
        for block in blocks[kind]:
            for local in block.local("", "", cut):
                if is_adapted(local, lora.targets):
                    of_factors = count * lora.rank * sum(local.shape)
                    of_weight = count * prod(local.shape)
                    which = "expert" if is_expert(local) else "dense"
                    factors += Numbers(**{which: of_factors})
                    adapted += Numbers(**{which: of_weight})
    return AdapterNumbers(factors, adapted)


def is_expert(local: LocalTensor) -> bool:
    """Return True for a tensor of routed experts."""
    return EXPERTS in f".{local.name}"


def _cut(at: Coordinates) -> Coordinates:
    """Return the coordinates that a block's parameters depend on."""
    return Coordinates(tp_size=at.tp_size, ep_size=at.ep_size, etp_size=at.etp_size)


@functools.cache
def block_numbers(block: Block, cut: Coordinates) -> Numbers:
    """Count a block's parameters on the first rank. Parameters are sharded evenly, so every rank
    has the same number."""
    return _numbers(block.local("", "", cut))


def _numbers(tensors: list[LocalTensor]) -> Numbers:
    found = Numbers()
    for local in tensors:
        if not local.is_buffer:
            count = prod(local.shape)
            found += Numbers(expert=count) if is_expert(local) else Numbers(count)
    return found


@dataclass(frozen=True)
class Product:
    """A matrix product in a block: each token is multiplied by `copies` matrices of `rows` x
    `columns`."""

    rows: int
    columns: int
    copies: int = 1
    is_expert: bool = False

    @property
    def flops(self) -> int:
        """Forward operations per token."""
        return 2 * self.rows * self.columns * self.copies


@functools.cache
def products(block: Block, topk: int) -> tuple[Product, ...]:
    """Return a block's matrix products, derived from the shapes of its tensors. A token visits
    `topk` of the routed experts."""
    found: list[Product] = []
    if isinstance(block, DeltaNet):
        channels = block.key_heads * block.mixed
        found.append(Product(channels, block.kernel))
        # a token reads, corrects and extends the state of each value head
        found.append(Product(block.key_dim, block.value_dim, 3 * block.value_heads))
    for name, shape in block.tensors("").items():
        if len(shape) == 3 and isinstance(block, FusedExperts):  # all experts of a layer
            found.append(Product(*shape[1:], topk, True))
        if len(shape) != 2:
            continue
        if ".experts.0." in f".{name}":
            found.append(Product(*shape, topk, True))
        elif ".experts." not in f".{name}":
            found.append(Product(*shape))
    return tuple(found)


@dataclass(frozen=True)
class LayerShape:
    """Costs of a layer, in addition to its parameter counts. All counts are per token.

    Attributes:
        attention, mlp: matrix products.
        core: forward operations per query-key pair.
        window: number of tokens that a query attends to; 0 for all preceding tokens.
        kv: elements in the KV cache.
        state: elements of a delta net's state per request (not per token), in float32.
        heads: activations divided by tensor parallelism: queries, keys, values and the attention
            output.
        expanded: part of `heads` that is the output of latent attention's up projections.
        core_output: the attention output.
        low_rank: latent activations, replicated on every tensor rank.
        ffn: columns of the dense MLP or the shared experts.
        routed_ffn: columns of all routed experts that a token visits.
        experts, topk: 0 for a dense layer.
    """

    hidden: int
    attention: tuple[Product, ...]
    mlp: tuple[Product, ...]
    core: int
    kv: int
    state: int
    heads: int
    expanded: int
    core_output: int
    low_rank: int
    ffn: int
    routed_ffn: int
    experts: int
    topk: int
    window: int = 0

    @property
    def flops(self) -> int:
        """Forward operations per token in the matrix products."""
        return sum(one.flops for one in (*self.attention, *self.mlp))

    def pairs(self, length: float) -> float:
        """Return the mean number of keys that a token of a sequence attends to."""
        window = min(self.window or length, length)
        return window - window * window / (2 * length)


def layer_shapes(decoder: Decoder) -> list[LayerShape]:
    """Return the shape of each layer, in order. Identical layers share one object."""
    shapes = _kind_shapes(decoder)
    return [shapes[kind] for kind in layer_kinds(decoder)[0]]


def head_shapes(decoder: Decoder) -> list[LayerShape]:
    """Return the shape of the layer in each multi-token-prediction head, whose input projection
    counts as part of its attention."""
    topk = int(decoder.values.get("num_experts_per_tok") or 0)
    projection = Product(decoder.hidden, 2 * decoder.hidden)
    found: list[LayerShape] = []
    for layer in range(decoder.num_layers, decoder.num_layers + decoder.num_mtp):
        shape = layer_shape(decoder.attention(layer), decoder.mlp(layer), decoder.hidden, topk)
        found.append(replace(shape, attention=(*shape.attention, projection)))
    return found


def embedding_copy(decoder: Decoder, at: Coordinates) -> Numbers:
    """Count the elements of the untrained copy of the embedding that the stage at `at` keeps for
    its prediction heads."""
    if not decoder.num_mtp or at.pp_size == 1 or at.pp_rank < at.pp_size - 1:
        return Numbers()
    return _numbers(decoder.first_tensors(at.virtual_stages()[-1]))


def _kind_shapes(decoder: Decoder) -> list[LayerShape]:
    topk = int(decoder.values.get("num_experts_per_tok") or 0)
    found: list[LayerShape] = []
    _, blocks, windows = layer_kinds(decoder)
    for (attention, mlp), window in zip(blocks, windows, strict=True):
        shape = layer_shape(attention, mlp, decoder.hidden, topk)
        found.append(replace(shape, window=window))
    return found


@functools.cache
def layer_shape(attention: Block, mlp: Block, hidden: int, topk: int) -> LayerShape:
    """Compute the costs of a layer with these two blocks.

    Raises:
        ModelError: the kind of block is not supported.
    """
    if isinstance(mlp, DenseMlp):
        experts = 0
        routed = 0
        ffn = mlp.ffn
        expert_ffn = 0
    elif isinstance(mlp, Experts | FusedExperts):
        experts = mlp.num_experts
        routed = topk
        ffn = mlp.shared_ffn
        expert_ffn = mlp.ffn
    else:
        raise ModelError(f"MLP of kind {type(mlp).__name__} is not supported by the planner")
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
        gate = query if block.output_gate else 0
        heads = query + 2 * key + before_norm + gate + query
        return {
            **{"core": 4 * query, "kv": 2 * key, "state": 0, "heads": heads},
            **{"expanded": 0, "core_output": query, "low_rank": 0},
        }
    if isinstance(block, DeltaNet):
        values = block.key_heads * block.values
        # the convolution's input and output, the gates, and the output
        heads = 2 * block.key_heads * block.mixed + 2 * values
        return {
            **{"core": 0, "kv": 0, "state": block.key_dim * values, "heads": heads},
            **{"expanded": 0, "core_output": values, "low_rank": 0},
        }
    if isinstance(block, LatentAttention):
        query = block.heads * (block.nope_dim + block.rope_dim)
        value = block.heads * block.v_dim
        low_rank = 2 * ((block.q_rank or 0) + block.kv_rank) + block.rope_dim
        return {
            **{
                "core": 2 * (query + value),
                "kv": block.kv_rank + block.rope_dim,
                "state": 0,
                "heads": 2 * query + 2 * value,
            },
            **{"expanded": 2 * query + value, "core_output": value, "low_rank": low_rank},
        }
    raise ModelError(f"attention of kind {type(block).__name__} is not supported by the planner")
