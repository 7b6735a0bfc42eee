"""Process groups of the Megatron layout, and this rank's coordinates in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.config.derived import expert_tensor_size, virtual_pipeline_size
from hybridflow.config.schema import ParallelConfig
from hybridflow.device.platform import Platform
from hybridflow.models.layout import Coordinates
from hybridflow.process.rendezvous import join_world

_layout = ParallelConfig()  # layers of the stages are taken from it; Megatron's groups do not know them


def initialize(config: ParallelConfig, seed: int, backend: str, timeout_s: float) -> None:
    """Join the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name and create Megatron's groups.

    `timeout_s` bounds every collective: when a rank dies, the others fail instead of waiting for ever.
    """
    global _layout
    _layout = config
    join_world(backend, timeout_s, undo=parallel_state.destroy_model_parallel)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(config)
        if virtual_pipeline_size(config) > 1
        else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=expert_tensor_size(config),
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=Platform.detect().kind == "cpu",  # nothing of ours uses them beside NCCL's
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def is_initialized() -> bool:
    """Whether this process has created its groups."""
    return bool(parallel_state.model_parallel_is_initialized())


def device() -> torch.device:
    """Where this rank computes."""
    return Platform.detect().current_device()


def coordinates() -> Coordinates:
    """This rank's coordinates; with virtual stages those of its first chunk (`Coordinates.virtual_stages` has all)."""
    return Coordinates(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        vpp_size=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        first_stage_layers=_layout.first_stage_layers,
        last_stage_layers=_layout.last_stage_layers,
        layers_per_stage=_layout.layers_per_stage,
    )


def all_coordinates() -> list[Coordinates]:
    """Every rank's coordinates, by global rank. A collective over the world."""
    mine = torch.tensor(coordinates().row(), dtype=torch.int64, device=device())
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [Coordinates.of_row(row.tolist()) for row in everyone]


def context_rank() -> int:
    """This rank's position among the ranks that share each sequence."""
    return int(parallel_state.get_context_parallel_rank())


def data_parallel_position() -> tuple[int, int, bool]:
    """(data-parallel rank, size, whether this rank returns its group's results: last stage, tensor and context rank
    0)."""
    return (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        is_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0,
    )


def tensor_share(tokens: Any) -> Any:
    """This tensor-parallel rank's part of the tokens [t], a tensor or an array, under sequence parallelism."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    return tokens.reshape(size, -1)[parallel_state.get_tensor_model_parallel_rank()]


def is_last_stage() -> bool:
    """Whether this rank holds the output layer."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)
