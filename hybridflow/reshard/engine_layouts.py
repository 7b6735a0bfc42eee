"""Hand-written layouts of SGLang ranks, used only by the dry run.

A training run instead discovers the layout by tracing the engine's own loader
(`hybridflow.engines.layout_tracer`), so it does not depend on hand-written tables. The dry run has
no engine to trace, and must plan for 1,024 ranks within seconds.

Conventions of SGLang 0.5.23: query, key and value are stacked in `qkv_proj`; gate is stacked over
up in `gate_up_proj` and `w13_weight`; experts are stacked; the vocabulary is padded to a multiple
of 64; KV heads are repeated if there are fewer of them than ranks; experts are first split by
expert parallelism and then by tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.models.blocks import DenseMlp, Experts, GroupedAttention, MlpNames, Norms
from hybridflow.models.decoder import Decoder
from hybridflow.models.delta_net import DeltaNet
from hybridflow.models.fp8 import FP8, SCALE_SUFFIX, BlockQuantisation
from hybridflow.models.fused_experts import FusedExperts
from hybridflow.models.layout import (
    Coordinates,
    LocalTensor,
    Piece,
    padded_vocab_size,
    split,
    stacked,
    vocabulary,
    whole,
)
from hybridflow.models.mla import LatentAttention
from hybridflow.reshard.layout import Catalog, Layout, RankLayout

Shape = tuple[int, ...]
Rows = tuple[str, int, int]  # HF tensor, first row, number of rows
VOCAB_MULTIPLE = 64
# SGLang's model files that deviate: the token embeddings are whole on every rank; ...
_WHOLE_EMBEDDING = "Gemma3ForCausalLM"
# ... norms across all heads are split with the heads, and the router is kept in float32; ...
_SPLIT_NORMS = "MiniMaxM2ForCausalLM"
# ... every pipeline stage has the output head; ...
_HEAD_IN_EVERY_STAGE = "GptOssForCausalLM"
# ... and nothing is fused, because it consists of transformers' modules
_UNFUSED = "SeedOssForCausalLM"


@dataclass(frozen=True)
class EngineShape:
    """Parallel sizes of `count` identical engines with `tensor * pipeline` ranks each.

    `expert` and `data_attention` must divide `tensor`; they correspond to SGLang's `--ep-size` and
    `--dp-size --enable-dp-attention`. `dense` is the tensor-parallel size of dense MLPs and shared
    experts: 1, or 0 to use all of `tensor`. SGLang's `--moe-dense-tp-size 1` with an
    `--moe-a2a-backend` replicates both on every rank.
    """

    tensor: int = 1
    expert: int = 1
    data_attention: int = 1
    pipeline: int = 1
    count: int = 1
    dense: int = 0

    def check(self, decoder: Decoder) -> None:
        """Raise WeightSyncError if the model cannot be split across this shape."""
        if min(self.tensor, self.expert, self.data_attention, self.pipeline, self.count) < 1:
            raise WeightSyncError(
                f"engine sizes and the number of engines must be 1 or more, got {self}"
            )
        if self.dense not in (0, 1):
            raise WeightSyncError(
                f"dense (the tensor-parallel size of dense MLPs) must be 1 or omitted, got {self}"
            )
        for field, value, key, size in self._rules(decoder):
            if size < 1 or value % size:
                raise WeightSyncError(
                    f"{field} is {value}, but must be a multiple of {key} ({size}); choose another "
                    "engine shape"
                )

    def _rules(self, decoder: Decoder) -> Iterator[tuple[str, int, str, int]]:
        """Yield (name of a size, the size, name of its divisor, the divisor)."""
        tensor = "the engine's tensor size"
        ranks = "the engine's attention ranks"
        attention_ranks = self.tensor // self.data_attention
        yield tensor, self.tensor, "its expert size", self.expert
        yield tensor, self.tensor, "its data-attention size", self.data_attention
        yield "num_hidden_layers", decoder.num_layers, "the engine's pipeline size", self.pipeline
        yield "num_attention_heads", decoder.heads, ranks, attention_ranks
        dense = self.dense or self.tensor
        for layer in decoder.kind_layers():
            attention = decoder.attention(layer)
            if isinstance(attention, GroupedAttention):
                many = max(attention.groups, attention_ranks)
                few = min(attention.groups, attention_ranks)
                yield f"num_key_value_heads or {ranks}", many, "the other", few
            if isinstance(attention, DeltaNet):
                yield "linear_num_key_heads", attention.key_heads, ranks, attention_ranks
            mlp = decoder.mlp(layer)
            if isinstance(mlp, Experts | FusedExperts):
                per_expert = self.tensor // self.expert
                yield "num_experts", mlp.num_experts, "the engine's expert size", self.expert
                yield (
                    "moe_intermediate_size",
                    mlp.ffn,
                    "the engine's tensors per expert",
                    per_expert,
                )
                yield "the shared experts' size", mlp.shared_ffn, tensor, dense
            elif isinstance(mlp, DenseMlp):
                yield "intermediate_size", mlp.ffn, tensor, dense


def engine_layout(
    decoder: Decoder,
    engines: Sequence[EngineShape],
    dtype: str,
    catalog: Catalog | None = None,
    quantisation: BlockQuantisation | None = None,
) -> Layout:
    """Build the layout of all ranks of all engines, engine by engine.

    Args:
        dtype: dtype of unquantised tensors.
        quantisation: the format of engines with linear layers in block-wise fp8.

    Raises:
        WeightSyncError: the model does not fit an engine's shape, or an engine rank would hold part
            of an fp8 block.
    """
    shapes = decoder.tensors()
    index = (catalog or Catalog.of(shapes, quantisation)).index()
    covered = {}
    if quantisation is not None:
        for name, full in shapes.items():
            if quantisation.covers(name, full):
                covered[name] = full
    classes: list[RankLayout] = []
    rank_class: list[int] = []
    replica: list[int] = []
    number = 0
    for shape in engines:
        shape.check(decoder)
        first = len(classes)
        ranks = shape.tensor * shape.pipeline
        for rank in range(ranks):
            tensors = EngineRank(decoder, shape, rank).tensors()
            if quantisation is not None:
                tensors = in_fp8(tensors, quantisation, covered)
            classes.append(RankLayout.of(tensors, index, dtype))
        for _ in range(shape.count):
            rank_class += range(first, first + ranks)
            replica += [number] * ranks
            number += 1
    class_of_rank = np.array(rank_class, dtype=np.int64)
    return Layout(tuple(classes), class_of_rank, np.array(replica, dtype=np.int64))


def in_fp8(
    tensors: Sequence[LocalTensor],
    quantisation: BlockQuantisation,
    covered: Mapping[str, Sequence[int]],
) -> list[LocalTensor]:
    """Convert buffers of linear layers to fp8, each followed by a buffer of scales
    (`NAME_scale_inv`).

    Other buffers are returned unchanged.

    Raises:
        WeightSyncError: a buffer starts or ends within a block, which SGLang does not support
            either.
    """
    result: list[LocalTensor] = []
    for local in tensors:
        are_covered = [piece.source in covered for piece in local.pieces]
        if not are_covered or not all(are_covered):
            result.append(local)
            continue
        pieces = []
        for piece in local.pieces:
            full = covered[piece.source]
            pieces.append(_scale_piece(piece, local.name, quantisation, full))
        name = f"{local.name}{SCALE_SUFFIX}"
        shape = quantisation.scale_shape(local.shape)
        result.append(replace(local, dtype=FP8))
        result.append(LocalTensor(name, shape, tuple(pieces), dtype="float32"))
    return result


def _scale_piece(
    piece: Piece, buffer: str, quantisation: BlockQuantisation, full: Sequence[int]
) -> Piece:
    block = quantisation.block
    place = piece.local_start[-2:]
    local = [*piece.local_start[:-2]]
    for start, at, size, whole_size, step in zip(
        piece.source_start, place, piece.shape, full, block, strict=True
    ):
        end = start + size
        if start % step or at % step or (end % step and end != whole_size):
            raise WeightSyncError(
                f"the engine's {buffer} holds [{start}:{end}] of {piece.source} (size "
                f"{whole_size}) at offset {at}, which is not aligned to fp8 blocks of {step}; "
                "choose a smaller tensor size, dense=1, or bfloat16"
            )
        local.append(at // step)
    first, shape = quantisation.blocks_of(piece.source_start, piece.shape)
    return Piece(f"{piece.source}{SCALE_SUFFIX}", first, tuple(local), shape)


def _whole(name: str, shape: Sequence[int]) -> LocalTensor:
    """Return a buffer with the name and the full contents of the HF tensor."""
    return whole(name, name, shape)


def _norms(norms: Norms, prefix: str, hidden: int) -> list[LocalTensor]:
    """Return a block's norms, which are replicated on every rank."""
    return [_whole(name, shape) for name, shape in norms.tensors(prefix, hidden).items()]


def _split(name: str, shape: Sequence[int], dim: int, rank: int, size: int) -> LocalTensor:
    """Return a buffer with the name of the HF tensor and an even shard of its contents."""
    return split(name, name, shape, dim, rank, size)


class EngineRank:
    """One rank of an engine. The pipeline stage is the outer index."""

    def __init__(self, decoder: Decoder, shape: EngineShape, rank: int) -> None:
        self.decoder = decoder
        self.shape = shape
        self.stage, self.rank = divmod(rank, shape.tensor)
        self.attention_size = shape.tensor // shape.data_attention
        self.attention_rank = self.rank % self.attention_size
        self.expert_size = shape.tensor // shape.expert
        self.expert_group, self.expert_rank = divmod(self.rank, self.expert_size)

    def tensors(self) -> list[LocalTensor]:
        """Return every buffer together with its pieces."""
        share = self.decoder.num_layers // self.shape.pipeline
        first = self.stage * share
        tensors = self.first()
        for layer in range(first, first + share):
            tensors += self.layer(layer)
        return tensors + self.last()

    def first(self) -> list[LocalTensor]:
        """Return the buffers of the modules before the first layer."""
        embedding = f"{self.decoder.stem}embed_tokens.weight"
        if self.stage > 0:
            return []
        if self.decoder.architecture == _WHOLE_EMBEDDING:
            return [_whole(embedding, (self.decoder.vocab_size, self.decoder.hidden))]
        return [self._vocab(embedding, embedding, self.attention_rank, self.attention_size)]

    def layer(self, layer: int) -> list[LocalTensor]:
        """Return the buffers of a layer."""
        prefix = f"{self.decoder.stem}layers.{layer}."
        return self._attention(prefix, layer) + self._mlp(prefix, layer)

    def last(self) -> list[LocalTensor]:
        """Return the buffers of the modules after the last layer."""
        decoder = self.decoder
        embedding = f"{self.decoder.stem}embed_tokens.weight"
        head = "lm_head.weight"
        is_last = self.stage == self.shape.pipeline - 1
        tensors = [_whole(f"{decoder.stem}norm.weight", (decoder.hidden,))] if is_last else []
        is_tied_here = decoder.tied and self.stage == 0
        if (is_last and not is_tied_here) or decoder.architecture == _HEAD_IN_EVERY_STAGE:
            # with data-parallel attention, the output head is still split over all tensor ranks
            # (unless --enable-dp-lm-head)
            source = embedding if decoder.tied else head
            tensors.append(self._vocab(head, source, self.rank, self.shape.tensor))
        return tensors

    def draft(self) -> list[LocalTensor]:
        """Return the buffers of the draft model, which consists of the decoder's
        multi-token-prediction heads; empty unless this is the last stage. The draft model shares
        the decoder's embedding and output layer."""
        decoder = self.decoder
        if self.stage < self.shape.pipeline - 1:
            return []
        tensors: list[LocalTensor] = []
        for head in range(decoder.num_mtp):
            names = decoder.head_names(head)
            own = [_whole(f"{name}.weight", (decoder.hidden,)) for name in names.norms]
            projection = (decoder.hidden, 2 * decoder.hidden)
            own.append(_whole(f"{names.projection}.weight", projection))
            layer = decoder.num_layers + head
            inner = [*self._attention(names.layer, layer), *self._mlp(names.layer, layer)]
            for target, locals_ in (("model.", own), ("model.decoder.", inner)):
                for local in locals_:
                    name = local.name.removeprefix(names.layer)
                    tensors.append(replace(local, name=f"draft.{target}{name}"))
        return tensors

    def _vocab(self, name: str, source: str, rank: int, size: int) -> LocalTensor:
        vocab = self.decoder.vocab_size
        hidden = self.decoder.hidden
        padded = padded_vocab_size(vocab, VOCAB_MULTIPLE)
        evenly = None if padded % size else padded
        return vocabulary(name, source, vocab, hidden, rank, size, evenly)

    def _attention(self, prefix: str, layer: int) -> list[LocalTensor]:
        block = self.decoder.attention(layer)
        if isinstance(block, LatentAttention):
            norm = _whole(f"{prefix}input_layernorm.weight", (block.hidden,))
            return [norm, *self._latent(block, f"{prefix}self_attn.", block.tensors(prefix))]
        if isinstance(block, GroupedAttention):
            norms = _norms(block.norms, prefix, block.hidden)
            return [*norms, *self._grouped(block, f"{prefix}self_attn.")]
        if isinstance(block, DeltaNet):
            norm = _whole(f"{prefix}input_layernorm.weight", (block.hidden,))
            return [norm, *self._delta_net(block, f"{prefix}linear_attn.")]
        raise WeightSyncError(
            f"attention of kind {type(block).__name__} is not supported: it has no engine layout"
        )

    def _grouped(self, block: GroupedAttention, hf: str) -> list[LocalTensor]:
        size = self.attention_size
        rank = self.attention_rank
        # the gate of a head follows its query
        q_rows = block.heads // size * block.head_dim * (1 + block.output_gate)
        kv_rows = max(block.groups // size, 1) * block.head_dim
        # with more ranks than groups, several ranks hold the same group
        holders = max(size // block.groups, 1)
        kv_first = rank // holders * kv_rows
        q = ("q", rank * q_rows, q_rows)
        cuts = (q, ("k", kv_first, kv_rows), ("v", kv_first, kv_rows))
        kinds: list[tuple[str, Shape]] = [("weight", (block.hidden,))]
        if block.qkv_bias:
            kinds.append(("bias", ()))
        tensors = []
        for kind, tail in kinds:
            parts = [(f"{hf}{name}_proj.{kind}", first, rows) for name, first, rows in cuts]
            tensors += self._fused(f"{hf}qkv_proj.{kind}", parts, tail)
        output = (block.hidden, block.heads * block.head_dim)
        tensors.append(_split(f"{hf}o_proj.weight", output, 1, rank, size))
        if block.out_bias:
            tensors.append(_whole(f"{hf}o_proj.bias", (block.hidden,)))
        if block.sinks:
            tensors.append(_split(f"{hf}sinks", (block.heads,), 0, rank, size))
        for name, width in block.norm_widths().items():
            norm = f"{hf}{name}_norm.weight"
            if self.decoder.architecture == _SPLIT_NORMS:
                heads = block.heads if name == "q" else block.groups
                shards = min(size, heads)
                tensors.append(_split(norm, (width,), 0, rank * shards // size, shards))
            else:
                tensors.append(_whole(norm, (width,)))
        return tensors

    def _fused(self, name: str, parts: list[Rows], tail: Shape) -> list[LocalTensor]:
        """Return the parts stacked in one buffer, or one buffer each if the model's modules are not
        fused."""
        if self.decoder.architecture == _UNFUSED:
            return [stacked(part[0], [part], tail) for part in parts]
        return [stacked(name, parts, tail)]

    def _delta_net(self, block: DeltaNet, hf: str) -> list[LocalTensor]:
        """Return the buffers of this rank's heads: all queries, then all keys, values and gates, or
        interleaved by key head if the checkpoint interleaves them."""
        size = self.attention_size
        rank = self.attention_rank
        values = block.key_heads * block.values
        own = values // size
        heads = block.value_heads // size
        if block.fused:
            rows = (block.mixed + block.values) * block.key_heads // size
            qkvz_parts = [(f"{hf}in_proj_qkvz.weight", rank * rows, rows)]
            both = 2 * heads
            ba_parts = [(f"{hf}in_proj_ba.weight", rank * both, both)]
        else:
            qkvz_parts = self._mixed(block, f"{hf}in_proj_qkv.weight")
            qkvz_parts.append((f"{hf}in_proj_z.weight", rank * own, own))
            ba_parts = [(f"{hf}in_proj_{name}.weight", rank * heads, heads) for name in "ba"]
        conv_parts = self._mixed(block, f"{hf}conv1d.weight")
        a_log = _split(f"{hf}A_log", (block.value_heads,), 0, rank, size)
        return [
            stacked(f"{hf}in_proj_qkvz.weight", qkvz_parts, (block.hidden,)),
            stacked(f"{hf}in_proj_ba.weight", ba_parts, (block.hidden,)),
            stacked(f"{hf}conv1d.weight", conv_parts, (1, block.kernel)),
            _split(f"{hf}dt_bias", (block.value_heads,), 0, rank, size),
            replace(a_log, dtype="float32"),
            _whole(f"{hf}norm.weight", (block.value_dim,)),
            _split(f"{hf}out_proj.weight", (block.hidden, values), 1, rank, size),
        ]

    def _mixed(self, block: DeltaNet, tensor: str) -> list[Rows]:
        """Return a rank's rows of an HF tensor that stacks all queries, then all keys, then all
        values.
        """
        keys = block.key_heads * block.key_dim
        own = keys // self.attention_size
        values = block.key_heads * block.values // self.attention_size
        rank = self.attention_rank
        return [
            (tensor, rank * own, own),
            (tensor, keys + rank * own, own),
            (tensor, 2 * keys + rank * values, values),
        ]

    def _latent(
        self, block: LatentAttention, hf: str, shapes: dict[str, Shape]
    ) -> list[LocalTensor]:
        def cut(name: str, dim: int) -> LocalTensor:
            tensor = f"{hf}{name}.weight"
            return _split(tensor, shapes[tensor], dim, self.attention_rank, self.attention_size)

        def full(name: str) -> LocalTensor:
            tensor = f"{hf}{name}.weight"
            return _whole(tensor, shapes[tensor])

        if block.q_rank is None:
            queries = [cut("q_proj", 0), full("kv_a_proj_with_mqa")]
        else:
            q = (f"{hf}q_a_proj.weight", 0, block.q_rank)
            kv = (f"{hf}kv_a_proj_with_mqa.weight", 0, block.kv_rank + block.rope_dim)
            name = f"{hf}fused_qkv_a_proj_with_mqa.weight"
            fused = stacked(name, [q, kv], (block.hidden,))
            queries = [fused, full("q_a_layernorm"), cut("q_b_proj", 0)]
        return [*queries, full("kv_a_layernorm"), cut("kv_b_proj", 0), cut("o_proj", 1)]

    def _mlp(self, prefix: str, layer: int) -> list[LocalTensor]:
        block = self.decoder.mlp(layer)
        if isinstance(block, DenseMlp):
            norms = _norms(block.norms, prefix, block.hidden)
            hf = f"{prefix}{block.prefix}"
            return norms + self._gated(hf, block.hidden, block.ffn, block.names)
        if isinstance(block, Experts):
            norm = _whole(f"{prefix}post_attention_layernorm.weight", (block.hidden,))
            return [norm, *self._experts(block, f"{prefix}{block.prefix}")]
        if isinstance(block, FusedExperts):
            hf = f"{prefix}{block.prefix}experts."
            rest = []
            for name, shape in block.tensors(prefix).items():
                if not name.startswith(hf):
                    rest.append(_whole(name, shape))
            return rest + self._fused_experts(block, hf)
        raise WeightSyncError(
            f"MLP of kind {type(block).__name__} is not supported: it has no engine layout"
        )

    def _gated(self, hf: str, hidden: int, ffn: int, names: MlpNames) -> list[LocalTensor]:
        size = self.shape.dense or self.shape.tensor
        rows = ffn // size
        rank = self.rank % size
        parts = names.rows(hf, ffn, rank * rows, rows)
        down = _split(f"{hf}{names.down}.weight", (hidden, ffn), 1, rank, size)
        return [*self._fused(f"{hf}gate_up_proj.weight", parts, (hidden,)), down]

    def _fused_experts(self, block: FusedExperts, hf: str) -> list[LocalTensor]:
        """Return the buffers of gpt-oss's experts. SGLang stores the matrices transposed, but the
        buffers are described in the checkpoint's orientation. Only one rank per expert adds the
        bias of `down_proj`."""
        at = Coordinates(
            ep_rank=self.expert_group,
            ep_size=self.shape.expert,
            etp_rank=self.expert_rank,
            etp_size=self.expert_size,
        )
        names = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
        found = []
        for local in block.shares(hf, hf, at):
            name, bias, _ = local.name.removeprefix(hf).partition("_bias")
            renamed = replace(local, name=f"{hf}{names[name]}{bias}")
            if name == "down_proj" and bias and self.expert_rank:
                renamed = replace(renamed, pieces=(), padding_rows=local.shape[0])
            found.append(renamed)
        return found

    def _experts(self, block: Experts, hf: str) -> list[LocalTensor]:
        share = block.num_experts // self.shape.expert
        cols = block.ffn // self.expert_size
        first = self.expert_group * share
        offset = self.expert_rank * cols
        hidden = block.hidden
        names = block.names
        w13: list[Piece] = []
        w2: list[Piece] = []
        for local in range(share):
            expert = f"{hf}experts.{first + local}."
            shape = (cols, hidden)
            for name, row in ((names.gate, 0), (names.up, cols)):
                place = (local, row, 0)
                w13.append(Piece(f"{expert}{name}.weight", (offset, 0), place, shape))
            down = f"{expert}{names.down}.weight"
            w2.append(Piece(down, (0, offset), (local, 0, 0), (hidden, cols)))
        gate = _whole(f"{hf}gate.weight", (block.num_experts, hidden))
        if self.decoder.architecture == _SPLIT_NORMS:
            gate = replace(gate, dtype="float32")
        tensors = [gate]
        if block.expert_bias:
            bias = _whole(f"{hf}{block.bias}", block.bias_shape or (block.num_experts,))
            if "moe_statics" in block.bias:  # ERNIE
                name = f"{hf}gate.e_score_correction_bias"
                tensors.append(replace(bias, name=name))
            else:
                tensors.append(replace(bias, dtype="float32"))
        w13_shape = (share, 2 * cols, hidden)
        w2_shape = (share, hidden, cols)
        tensors.append(LocalTensor(f"{hf}experts.w13_weight", w13_shape, tuple(w13)))
        tensors.append(LocalTensor(f"{hf}experts.w2_weight", w2_shape, tuple(w2)))
        if block.shared_ffn:
            tensors += self._gated(f"{hf}{block.shared}.", hidden, block.shared_ffn, names)
        if block.shared_gate:
            tensors.append(_whole(f"{hf}{block.shared}_gate.weight", (1, hidden)))
        return tensors
