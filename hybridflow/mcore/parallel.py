"""Process groups of the Megatron layout, and this rank's coordinates in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
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
