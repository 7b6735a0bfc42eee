"""Tiny models of every family, the layouts that the tests go through, and an oracle that reads
Megatron's buffers without our maps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.models import family_of
from hybridflow.models.decoder import Decoder
from hybridflow.models.layout import Coordinates, ParallelShape
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import Catalog, Layout, megatron_layout, rank_tensors
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.slices import SlicePlan
from hybridflow.sync.messages import Item, Messages
from hybridflow.sync.transports.base import Payload
from tests.models import FAMILIES

LAYOUTS: dict[str, tuple[ParallelShape, tuple[EngineShape, ...]]] = {
    "TP2.PP2.EP2 to 2 x TP1": (
        ParallelShape(4, tensor=2, pipeline=2, expert=2),
        (EngineShape(count=2),),
    ),
    "TP2.PP2 to TP2": (
        ParallelShape(4, tensor=2, pipeline=2, expert_tensor=2),
        (EngineShape(tensor=2),),
    ),
    "TP4.EP2.ETP2 to TP2.EP2": (
        ParallelShape(4, tensor=4, expert=2, expert_tensor=2),
        (EngineShape(tensor=2, expert=2),),
    ),
    "PP2.VPP2 to TP1": (ParallelShape(2, pipeline=2, virtual_pipeline=2), (EngineShape(),)),
    "DP2.EP2 to TP2 and TP1": (ParallelShape(2, expert=2), (EngineShape(tensor=2), EngineShape())),
    "TP8.EP8 with PP2 uneven to TP4.DPA2.EP2 and TP8": (
        ParallelShape(16, tensor=8, pipeline=2, expert=8, first_stage_layers=1),
        (EngineShape(tensor=4, expert=2, data_attention=2), EngineShape(tensor=8)),
    ),
    "PP2.VPP2 of 1 + 1 + 2 + 0 layers to TP2": (
        ParallelShape(2, pipeline=2, virtual_pipeline=2, layers_per_stage=(1, 1, 2, 0)),
        (EngineShape(tensor=2),),
    ),
    "TP1 to PP2.TP2": (ParallelShape(1), (EngineShape(tensor=2, pipeline=2),)),
}
Buffers = dict[str, np.ndarray]


Mail = dict[tuple[int, int, int], torch.Tensor]


class Post:
    """A channel whose messages are there at once."""

    def __init__(self, mail: Mail, rank: int) -> None:
        self.mail = mail
        self.rank = rank

    def send(self, peer: int, tag: int, payload: Payload) -> Post:
        assert (self.rank, peer, tag) not in self.mail
        self.mail[self.rank, peer, tag] = payload.tensor.clone()
        return self

    def receive(self, peer: int, tag: int, into: Payload) -> Post:
        into.tensor.copy_(self.mail.pop((peer, self.rank, tag)))
        return self

    def wait(self) -> None:
        pass

    close = abort = wait


def decoder_of(name: str, mtp: bool = False) -> Decoder:
    """The family of a tiny model."""
    family = family_of(FAMILIES[name], mtp=mtp)
    assert isinstance(family, Decoder)
    return family


def plan_of(
    decoder: Decoder,
    shape: ParallelShape,
    engines: Sequence[EngineShape],
    staging_bytes: int = 1 << 20,
) -> SlicePlan:
    """A plan in fp32."""
    catalog = Catalog.of(decoder.tensors())
    source = megatron_layout(decoder, shape.coordinates(), "float32")
    return make_plan(catalog, source, engine_layout(decoder, engines, "float32"), staging_bytes)


def random_weights(decoder: Decoder) -> Buffers:
    """A value of its own for every element of every HF tensor."""
    rng = np.random.default_rng(7)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in decoder.tensors().items()
    }


def trainer_buffers(
    decoder: Decoder, ranks: Sequence[Coordinates], weights: Mapping[str, np.ndarray]
) -> list[Buffers]:
    """Every trainer rank's parameters, imported through the map."""
    held = []
    for at in ranks:
        mine: Buffers = {}
        for local in rank_tensors(decoder, at):
            mine[local.name] = np.zeros(local.shape, dtype=np.float32)
            for piece in local.pieces:
                region = tuple(
                    slice(s, s + n) for s, n in zip(piece.source_start, piece.shape, strict=True)
                )
                mine[local.name][piece.slices()] = weights[piece.source][region]
        held.append(mine)
    return held


def engine_buffers(
    layout: Layout, catalog: Catalog, weights: Mapping[str, np.ndarray] | None
) -> list[Buffers]:
    """Every engine rank's buffers; filled with the weights, or with NaN where None is given.
    Padding is zero either way."""
    held = []
    for number in layout.rank_class.tolist():
        rank = layout.classes[number]
        mine = {
            name: np.full(shape, np.nan, dtype=np.float32)
            for name, shape in zip(rank.names, rank.shapes.tolist(), strict=True)
        }
        for row, tensor in enumerate(rank.tensor.tolist()):
            place = _box(rank.local[row], rank.size[row])
            target = mine[rank.names[int(rank.buffer[row])]]
            if tensor < 0:
                target[place] = 0
            elif weights is not None:
                value = weights[catalog.names[tensor]].reshape(catalog.shapes[tensor])
                target[place] = value[_box(rank.start[row], rank.size[row])]
        held.append(mine)
    return held


def execute(
    plan: SlicePlan, trainers: Sequence[Buffers], engines: Sequence[Buffers], part_bytes: int = 0
) -> int:
    """Carry the plan out in this process; returns the bytes that travelled (4 an element)."""
    messages = Messages(plan, part_bytes)
    mail = {}
    sent = 0
    for rank, buffers in enumerate(trainers):
        for message in messages.outgoing(rank):
            parts = [_view(buffers, item).reshape(-1) for item in message.items]
            assert (rank, message.peer, message.tag) not in mail
            mail[rank, message.peer, message.tag] = np.concatenate(parts)
    for rank, buffers in enumerate(engines):
        last = (-1, -1, -1)
        for message in messages.incoming(rank):
            place = (message.step, message.part, message.peer)
            assert place > last, "a rank's messages come in order, each once"
            last = place
            packed = mail.pop((message.peer, rank, message.tag))
            assert packed.nbytes == message.nbytes
            sent += packed.nbytes
            for item in message.items:
                view = _view(buffers, item)
                view[...] = packed[: view.size].reshape(view.shape)
                packed = packed[view.size :]
            assert packed.size == 0
    assert not mail
    return sent


def _view(buffers: Mapping[str, np.ndarray], item: Item) -> np.ndarray:
    whole = buffers[item.buffer]
    return whole.reshape((1,) * (3 - whole.ndim) + whole.shape)[_box(item.start, item.size)]


def _box(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(int(s), int(s) + int(n)) for s, n in zip(start, size, strict=True))


# ---- the oracle: Megatron's conventions as its documentation and tools have them, nothing of ours
# ----------------------------------------

_COLUMN = (
    "linear_qkv.",
    "linear_q_up_proj.weight",
    "linear_q_proj.weight",
    "linear_kv_up_proj.weight",
    "word_embeddings",
    "output_layer",
    "eh_proj",
)
_ROW = ("linear_proj.weight", "linear_fc2.weight")


def hf_from_megatron(
    hf: Mapping[str, Any], ranks: Sequence[Coordinates], held: Sequence[Buffers]
) -> Buffers:
    """HF tensors, gathered from the trainers' buffers as a converter would: whole Megatron tensors
    first, then HF's form.

    Covers attention, MLPs, experts and vocabularies; norms and the like are left under Megatron's
    names with layers made global.
    """
    result: Buffers = {}
    for at, mine in zip(ranks, held, strict=True):
        for name in mine:
            shards = _shards(name, at, ranks, held)
            layer, short = _global_layer(name, at, int(hf["num_hidden_layers"]))
            result |= _to_hf(hf, layer, short, shards, at)
    return result


def _shards(
    name: str, at: Coordinates, ranks: Sequence[Coordinates], held: Sequence[Buffers]
) -> list[np.ndarray]:
    """The tensor-parallel shards of a parameter, in order of the rank."""
    is_expert = ".experts." in name
    shards: dict[int, np.ndarray] = {}
    for other, buffers in zip(ranks, held, strict=True):
        same = other.pp_rank == at.pp_rank and (not is_expert or other.ep_rank == at.ep_rank)
        if same:
            shards.setdefault(other.etp_rank if is_expert else other.tp_rank, buffers[name])
    return [shards[index] for index in sorted(shards)]


def _global_layer(name: str, at: Coordinates, num_layers: int) -> tuple[int, str]:
    chunk = int(m.group(1)) if (m := re.match(r"chunk(\d+)\.", name)) else 0
    short = re.sub(r"^chunk\d+\.", "", name)
    if not (found := re.match(r"decoder\.layers\.(\d+)\.(.*)", short)):
        return -1, short
    if at.layers_per_stage:
        offset = sum(at.layers_per_stage[: chunk * at.pp_size + at.pp_rank])
    elif at.first_stage_layers:
        offset = 0 if at.pp_rank == 0 else at.first_stage_layers
    else:
        offset = chunk * (num_layers // at.vpp_size) + at.pp_rank * (
            num_layers // at.pp_size // at.vpp_size
        )
    return offset + int(found.group(1)), found.group(2)


def _to_hf(
    hf: Mapping[str, Any], layer: int, name: str, shards: list[np.ndarray], at: Coordinates
) -> Buffers:
    prefix = f"model.layers.{layer}."
    vocab = int(hf["vocab_size"])
    simple = {
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
        "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight", 0),
        "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight", 0),
        "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight", 0),
        "self_attention.out_proj.weight": ("linear_attn.out_proj.weight", 1),
        "self_attention.A_log": ("linear_attn.A_log", 0),
        "self_attention.dt_bias": ("linear_attn.dt_bias", 0),
    }
    result: Buffers = {}
    if name == "embedding.word_embeddings.weight":
        result = {"model.embed_tokens.weight": np.concatenate(shards)[:vocab]}
    elif name == "output_layer.weight" and not hf.get("tie_word_embeddings"):
        result = {"lm_head.weight": np.concatenate(shards)[:vocab]}
    elif name.startswith("self_attention.linear_qkv.") and "layer_norm" not in name:
        result = _qkv(hf, f"{prefix}self_attn.", name.rsplit(".", 1)[1], np.concatenate(shards))
    elif name in ("self_attention.in_proj.weight", "self_attention.conv1d.weight"):
        result = _delta_net(hf, f"{prefix}linear_attn.", name, np.concatenate(shards))
    elif name in simple:
        result = {prefix + simple[name][0]: np.concatenate(shards, axis=simple[name][1])}
    elif found := re.match(
        r"mlp\.(experts\.|shared_experts\.|)linear_fc([12])\.weight(\d*)$", name
    ):
        result = _mlp(hf, prefix, found.groups(), shards, at)
    return result


def _qkv(hf: Mapping[str, Any], prefix: str, kind: str, full: np.ndarray) -> Buffers:
    groups = int(hf["num_key_value_heads"])
    per = int(hf["num_attention_heads"]) // groups
    if "linear_num_key_heads" in hf:  # attention with an output gate
        parts = full.reshape(groups, 2 * per + 2, -1, *full.shape[1:])
        both = np.stack([parts[:, :per], parts[:, per : 2 * per]], axis=2)
        cut = {"q": both, "k": parts[:, -2], "v": parts[:, -1]}
    else:
        parts = full.reshape(groups, per + 2, -1, *full.shape[1:])
        cut = {"q": parts[:, :per], "k": parts[:, per], "v": parts[:, per + 1]}
    return {
        f"{prefix}{name}_proj.{kind}": value.reshape(-1, *full.shape[1:])
        for name, value in cut.items()
    }


def _delta_net(hf: Mapping[str, Any], prefix: str, name: str, full: np.ndarray) -> Buffers:
    """The rows of each key head: query, key, values, and for the projection betas, decays and
    gates."""
    heads = int(hf["linear_num_key_heads"])
    ratio = int(hf["linear_num_value_heads"]) // heads
    key = int(hf["linear_key_head_dim"])
    values = ratio * int(hf["linear_value_head_dim"])
    tail = full.shape[1:]
    ends = np.cumsum([key, key, values, ratio, ratio])
    parts = np.split(full.reshape(heads, -1, *tail), ends, axis=1)
    flat = [part.reshape(-1, *tail) for part in parts]
    if name.endswith("conv1d.weight"):
        return {f"{prefix}conv1d.weight": np.concatenate(flat[:3])}
    if hf["model_type"] == "qwen3_next":
        q, k, v, b, a, z = parts
        joined = {"qkvz": [q, k, v, z], "ba": [b, a]}
        return {
            f"{prefix}in_proj_{short}.weight": np.concatenate(some, axis=1).reshape(-1, *tail)
            for short, some in joined.items()
        }
    whole = {"qkv": np.concatenate(flat[:3]), "b": flat[3], "a": flat[4], "z": flat[5]}
    return {f"{prefix}in_proj_{short}.weight": value for short, value in whole.items()}


def _mlp(
    hf: Mapping[str, Any],
    prefix: str,
    found: Sequence[str],
    shards: list[np.ndarray],
    at: Coordinates,
) -> Buffers:
    kind, linear, number = found
    mixtral = hf["model_type"] in ("mixtral", "minimax_m2")
    if "shared_expert_intermediate_size" in hf:
        kind = kind.replace("shared_experts", "shared_expert")
    place = f"{prefix}{'block_sparse_moe' if mixtral else 'mlp'}.{kind}"
    if number:
        experts = int(
            hf.get("num_experts")
            or hf.get("num_local_experts")
            or hf.get("moe_num_experts")
            or hf["n_routed_experts"]
        )
        place += f"{at.ep_rank * (experts // at.ep_size) + int(number)}."
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    if linear == "2":
        return {f"{place}{down}.weight": np.concatenate(shards, axis=1)}
    halves = [np.split(shard, 2) for shard in shards]
    if hf["model_type"] == "glm4":
        whole = np.concatenate([half[i] for i in range(2) for half in halves])
        return {f"{place}gate_up_proj.weight": whole}
    return {
        f"{place}{part}.weight": np.concatenate([half[i] for half in halves])
        for i, part in enumerate((gate, up))
    }
