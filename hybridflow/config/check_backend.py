"""Checks for settings that the training backend does not support. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config import derived, megatron_settings
from hybridflow.config.keys import differing
from hybridflow.config.schema import ParallelConfig, RunConfig

_FSDP = "actor.backend=fsdp"
_MEGATRON = "actor.backend=megatron"
_UNAVAILABLE = {
    "actor.recompute_modules": ("core_attn",),
    "actor.router_replay": "none",
    "actor.expert_bias_update_rate": 0,
    "actor.router_aux_loss_coef": 0,
    "actor.router_z_loss_coef": 0,
    "actor.optim.precision_aware": False,
    "actor.megatron": {},
    "actor.mtp.train": False,
}
_OF_MEGATRON = (
    *(
        "first_stage_layers",
        "last_stage_layers",
        "layers_per_stage",
        "sequence",
        "distributed_optimizer",
    ),
    *("overlap_grad_reduce", "overlap_param_gather"),
)


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each unsupported setting. With Megatron, only `actor.megatron` is
    checked.
    """
    if config.actor.backend != "fsdp":
        yield from megatron_settings.problems(config.actor.megatron)
        return
    yield from _layout(config)
    for key, value, wanted in differing(config, _UNAVAILABLE):
        yield f"{key}={value} is not supported with {_FSDP}; set it to {wanted}, or {_MEGATRON}"
    if config.actor.recompute == "selective":
        yield (
            f"actor.recompute=selective is not supported with {_FSDP}; set it to full or none, or "
            f"{_MEGATRON}"
        )
    for role in derived.roles_in_use(config)[1:]:
        if derived.is_colocated(config, role):
            yield (
                f"{role}.placement=colocated requires the actor's Megatron processes, which "
                f"{_FSDP} does not have; set {role}.placement=own"
            )


def _layout(config: RunConfig) -> Iterator[str]:
    parallel = config.actor.parallel
    plain = ParallelConfig()
    for key in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(parallel, key)) != 1:
            yield (
                f"actor.parallel.{key}={size}: {_FSDP} shards over all processes and supports no "
                f"other parallelism; set it to 1, or {_MEGATRON}"
            )
    for key in ("virtual_pipeline", "expert_tensor"):
        if (size := getattr(parallel, key)) not in (None, 1):
            yield (
                f"actor.parallel.{key}={size} is not supported with {_FSDP}; set it to null, or "
                f"{_MEGATRON}"
            )
    wanted = {f"actor.parallel.{key}": getattr(plain, key) for key in _OF_MEGATRON}
    for key, value, default in differing(config, wanted):
        yield f"{key}={value} requires Megatron; with {_FSDP} leave it at {default}"
