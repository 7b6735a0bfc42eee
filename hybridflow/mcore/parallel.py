"""Process groups of the Megatron layout, this rank's coordinates in it, and its share of a packed
micro-batch.

Context parallelism uses a zigzag layout: with c ranks, every segment is split into 2c chunks of
equal length. Rank r gets chunks r and 2c-1-r, so that under a causal mask all ranks do the same
amount of work. Megatron's rotary embedding (rope_utils.py:130) and Transformer Engine require this
layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.algorithms.vocab_parallel import SumOverGroup
from hybridflow.config.schema import ParallelConfig
from hybridflow.device.platform import Platform
from hybridflow.models.layout import Coordinates, ParallelShape
from hybridflow.process.rendezvous import join_world

_shape = ParallelShape(1)  # the world's shape


def initialize(config: ParallelConfig, seed: int, backend: str, timeout_s: float) -> None:
    """Join the world described by the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
    create Megatron's groups.

    `timeout_s` limits every collective, so that the other ranks fail instead of hanging if one
    dies.
    """
    global _shape
    join_world(backend, timeout_s, undo=parallel_state.destroy_model_parallel)
    _shape = shape = ParallelShape.of(config, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        virtual_pipeline_model_parallel_size=shape.virtual_pipeline
        if shape.virtual_pipeline > 1
        else None,
        context_parallel_size=shape.context,
        expert_model_parallel_size=shape.expert,
        expert_tensor_parallel_size=shape.expert_tensor,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=Platform.detect().kind == "cpu",  # unused with NCCL
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def is_initialized() -> bool:
    """Return True if this process has created its groups."""
    return bool(parallel_state.model_parallel_is_initialized())


def device() -> torch.device:
    """Return the device on which this rank computes."""
    return Platform.detect().current_device()


def coordinates() -> Coordinates:
    """Return this rank's coordinates.

    With virtual stages, these are the coordinates of its first chunk (`Coordinates.virtual_stages`
    returns all).
    """
    return _shape.place(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
    )


def all_coordinates() -> list[Coordinates]:
    """Return every rank's coordinates, indexed by global rank. Collective over all ranks."""
    mine = torch.tensor(coordinates().row(), dtype=torch.int64, device=device())
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [Coordinates.of_row(row.tolist()) for row in everyone]


def context_rank() -> int:
    """Return this rank's position in the context-parallel group that shares each sequence."""
    return int(parallel_state.get_context_parallel_rank())


def data_parallel_position() -> tuple[int, int, bool]:
    """Return (data-parallel rank, data-parallel size, True if this rank reports its group's
    results).

    Results are reported by the last stage's rank with tensor and context rank 0.
    """
    return (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        is_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0,
    )


def tensor_share(tokens: Any) -> Any:
    """Return this tensor-parallel rank's share of the tokens [t] under sequence parallelism.

    `tokens` is a tensor or an array.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    return tokens.reshape(size, -1)[parallel_state.get_tensor_model_parallel_rank()]


def is_last_stage() -> bool:
    """Return True if this rank's stage contains the output layer."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


@dataclass(frozen=True)
class ZigZag:
    """For each packed row [t], the rank that owns it (`owner`) and its row index on that rank
    (`local`)."""

    owner: np.ndarray
    local: np.ndarray

    @classmethod
    def of(cls, bounds: np.ndarray, size: int) -> ZigZag:
        """Build the layout for segment bounds `bounds` [s + 1].

        Every segment's length must be a multiple of 2 x `size` (any length if `size` is 1).
        """
        lengths = np.diff(bounds)
        starts = np.repeat(bounds[:-1], lengths)
        total = int(bounds[-1])
        step = np.arange(total) - starts
        if size == 1:
            return cls(np.zeros(total, np.int64), np.arange(total))
        chunk = np.repeat(lengths // (2 * size), lengths)
        number = step // chunk
        second = number >= size
        owner = np.where(second, 2 * size - 1 - number, number)
        return cls(owner, starts // size + step - number * chunk + np.where(second, chunk, 0))

    def rows_of(self, rank: int) -> np.ndarray:
        """Return the indices [t / size] of the packed rows on `rank`, in local order."""
        rows = np.flatnonzero(self.owner == rank)
        ordered = np.empty_like(rows)
        ordered[self.local[rows]] = rows
        return ordered


def gather_tokens(values: Tensor, places: Tensor | None, total: int) -> Tensor:
    """Gather the values [..., n] of each context-parallel rank's response tokens into [..., total]
    on all ranks.

    `places` [n] contains the indices of this rank's tokens, or is None without context parallelism.
    Since all ranks then compute the same loss, the backward pass returns to each rank only the
    gradient of its own tokens.
    """
    if places is None:
        return values
    group = parallel_state.get_context_parallel_group()
    return SumOverGroup.apply(
        values.new_zeros((*values.shape[:-1], total)).index_copy(-1, places, values), group
    )
