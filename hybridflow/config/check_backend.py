"""What `actor.backend=fsdp` cannot do, by key. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import ParallelConfig, RunConfig
from hybridflow.errors import ConfigError

_FSDP, _MEGATRON = "actor.backend=fsdp", "actor.backend=megatron"


def problems(config: RunConfig) -> Iterator[str]:
    """Every problem as one line; none with Megatron."""
    if config.actor.backend != "fsdp":
        return
    yield from _layout(config.actor.parallel)
    actor = config.actor
    refused: tuple[tuple[str, Any, Any], ...] = (
        ("recompute", actor.recompute, "none"),
        ("recompute_modules", list(actor.recompute_modules), ["core_attn"]),
        ("router_replay", actor.router_replay, "none"),
        ("expert_bias_update_rate", actor.expert_bias_update_rate, 0),
        ("router_aux_loss_coef", actor.router_aux_loss_coef, 0),
        ("router_z_loss_coef", actor.router_z_loss_coef, 0),
    )
    for key, value, wanted in refused:
        if value != wanted:
            yield f"actor.{key}={value} is not available with {_FSDP}; set it to {wanted}, or {_MEGATRON}"
    if actor.optim.precision_aware:
        yield f"actor.optim.precision_aware=true is not available with {_FSDP}; set it to false, or {_MEGATRON}"
    for role in derived.roles_in_use(config)[1:]:
        if derived.is_colocated(config, role):
            yield (
                f"{role}.placement=colocated needs the actor's Megatron processes, and {_FSDP} has none; set "
                f"{role}.placement=own"
            )
    yield from _family(config)


def _layout(parallel: ParallelConfig) -> Iterator[str]:
    plain = ParallelConfig()
    for key in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(parallel, key)) != 1:
            yield (
                f"actor.parallel.{key}={size}: {_FSDP} shards over all processes and has no other cut; set it to 1, or "
                f"{_MEGATRON}"
            )
    for key in ("virtual_pipeline", "expert_tensor"):
        if (size := getattr(parallel, key)) not in (None, 1):
            yield f"actor.parallel.{key}={size}: {_FSDP} has no such cut; set it to null, or {_MEGATRON}"
    for key in (
        "first_stage_layers",
        "last_stage_layers",
        "layers_per_stage",
        "sequence",
        "distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
    ):
        if (value := getattr(parallel, key)) != (default := getattr(plain, key)):
            yield (
                f"actor.parallel.{key}={str(value).lower()} is Megatron's; with {_FSDP} leave it at "
                f"{str(default).lower()}"
            )


def _family(config: RunConfig) -> Iterator[str]:
    try:
        sizes = derived.hf_config(config.model)
    except ConfigError:
        return  # reported by the sizes
    if derived.num_experts(sizes):
        yield f"model_type={sizes.get('model_type')}: {_FSDP} trains models without experts; set {_MEGATRON}"
