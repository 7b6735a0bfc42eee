"""What each rank does in the tests of the transports: ranks 0..3 are the trainer's, the others the engines'."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.models import family_of
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import Catalog, Layout, ParallelShape, megatron_layout
from hybridflow.reshard.messages import Messages
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.slices import SlicePlan
from hybridflow.reshard.stream import ReceiveStaging, SendStaging, StreamStats, largest_message, receive_stream, send_stream
from hybridflow.reshard.transports import open_receiver, open_sender
from hybridflow.reshard.transports.base import Endpoint

TRAINERS = 4
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96, "vocab_size": 331,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "max_position_embeddings": 128,
}  # fmt: skip


def rank_and_store() -> tuple[int, str, int]:
    """This process's rank, and the store, which rank 0 serves."""
    from hybridflow.rendezvous import master_store

    rank, host, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        globals()["_store"] = master_store(host, port, 60)  # as long as the process
    return rank, host, port


class Case:
    """A plan of the tiny MoE, and the weights that it carries: a value of its own for every element, another in every version."""

    def __init__(self, engines: list[EngineShape], trainer_dtype: str = "float32", engine_dtype: str = "float32", staging: int = 1 << 17):
        self.family = family_of(MOE)
        self.catalog = Catalog.of(self.family.tensors())
        source = megatron_layout(self.family, ParallelShape(TRAINERS, tensor=2, pipeline=2, expert=2).coordinates(), trainer_dtype)
        self.plan: SlicePlan = make_plan(self.catalog, source, engine_layout(self.family, engines, engine_dtype), staging)
        self.messages = Messages(self.plan)

    def weight(self, tensor: int, version: int) -> torch.Tensor:
        """One HF tensor."""
        seed = torch.Generator().manual_seed(1000 * version + tensor)
        return torch.randn(self.catalog.shapes[tensor].tolist(), generator=seed)

    def buffers(self, layout: Layout, rank: int, version: int | None) -> dict[str, torch.Tensor]:
        """A rank's buffers with its slices of the weights, or with NaN; padding is zero."""
        mine = layout.classes[int(layout.rank_class[rank])]
        held = {
            name: torch.full(shape, torch.nan, dtype=getattr(torch, dtype))
            for name, shape, dtype in zip(mine.names, mine.shapes.tolist(), mine.dtypes, strict=True)
        }
        for row, tensor in enumerate(mine.tensor.tolist()):
            place = held[mine.names[int(mine.buffer[row])]][box(mine.local[row], mine.size[row])]
            if tensor < 0:
                place.zero_()
            elif version is not None:
                place.copy_(self.weight(tensor, version)[box(mine.start[row], mine.size[row])])
        return held


def box(start: np.ndarray, size: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(int(s), int(s) + int(n)) for s, n in zip(start, size, strict=True))


def first_sync(transport: str) -> Any:
    rank, host, port = rank_and_store()
    case = Case([EngineShape(tensor=2)])
    endpoint = Endpoint(transport, "first", host, port, (0, 1, 2, 3), (0, 1), case.plan.bucket_bytes, 20.0)
    if rank < TRAINERS:
        channel = open_sender(endpoint, rank)
        stats = send_stream(case.messages.outgoing(rank), case.buffers(case.plan.source, rank, 1), channel, SendStaging(rank))
        channel.close()
        return vars(stats)
    engine = rank - TRAINERS
    live = case.buffers(case.plan.target, engine, None)
    receiver = open_receiver(endpoint, engine)
    received = receive_stream(case.messages.incoming(engine), receiver, ReceiveStaging(engine), True, live)
    received.commit(live)
    want = case.buffers(case.plan.target, engine, 1)
    receiver.close()
    return vars(received.stats) | {"right": all(torch.equal(live[name], want[name]) for name in want)}
