"""Checks for unsupported settings of `actor.lora`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import RolloutConfig, RunConfig


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each adapter setting that is invalid with any model."""
    actor = config.actor
    lora = config.actor.lora
    if lora.dropout:
        yield (
            f"actor.lora.dropout={lora.dropout} must be 0: with dropout an update would train a "
            "different policy from the one that was scored"
        )
    if not lora.rank:
        if lora.targets:
            yield (
                f"actor.lora.targets={list(lora.targets)} has no effect with rank 0; set "
                "actor.lora.rank, for example to 8, or remove the targets"
            )
        if lora.sync != "merged":
            yield (
                f"actor.lora.sync={lora.sync} has no effect with rank 0; set actor.lora.rank, for "
                "example to 8, or remove it"
            )
        return
    if lora.sync == "adapter":
        yield from _kept_problems(config)
    if twice := sorted({target for target in lora.targets if lora.targets.count(target) > 1}):
        yield f"actor.lora.targets contains {', '.join(twice)} twice; list each layer once"
    if not actor.freeze_vision_tower:
        yield (
            f"actor.lora.rank={lora.rank} freezes the model, but actor.freeze_vision_tower=false "
            "would train its vision tower; change one of them"
        )
    if actor.expert_bias_update_rate:
        yield (
            f"actor.lora.rank={lora.rank} freezes the model, but "
            f"actor.expert_bias_update_rate={actor.expert_bias_update_rate} would change its "
            "expert biases; set one of them to 0"
        )
    if actor.mtp.train:
        yield (
            f"actor.lora.rank={lora.rank} freezes the model, but actor.mtp.train=true trains its "
            "multi-token-prediction heads; set the rank to 0, or actor.mtp.train=false"
        )


def _kept_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each setting that is incompatible with `actor.lora.sync=adapter`, which
    makes engines keep adapters separate from their weights.
    """
    named = "actor.lora.sync=adapter"
    rollout = config.rollout
    if config.actor.backend == "fsdp":
        yield (
            f"{named} is not supported with actor.backend=fsdp; set actor.lora.sync=merged, or "
            "actor.backend=megatron"
        )
    if rollout.engine != RolloutConfig.engine:
        yield (
            f"{named} requires rollout.engine={RolloutConfig.engine}, because {rollout.engine} "
            "receives merged weights; set actor.lora.sync=merged"
        )
    if routed := [one for one in config.actor.lora.targets if one.startswith("experts.")]:
        yield (
            f"{named}: engines cannot keep adapters for {', '.join(routed)}; remove these targets, "
            "or set actor.lora.sync=merged"
        )
    if rollout.quantization:
        yield (
            f"{named} is not supported with rollout.quantization={rollout.quantization}; set "
            "actor.lora.sync=merged"
        )
    if rollout.sleep_while_training:
        yield (
            f"{named} with rollout.sleep_while_training=true: sleeping engines drop their weights, "
            "so every sync would have to send all of them; set one of the two keys to its default"
        )


def target_problems(config: RunConfig, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the targets that do not exist in a model with these sizes."""
    lora = config.actor.lora
    if not lora.rank or not sizes:
        return
    if lora.sync == "adapter" and sizes.get("kv_lora_rank"):
        yield (
            f"actor.lora.sync=adapter: model_type={sizes.get('model_type')} has latent attention, "
            "which engines do not compute with the linear layers that have adapters; set "
            "actor.lora.sync=merged"
        )
    has = derived.lora_targets(sizes)
    missing = [target for target in lora.targets if target not in has]
    if missing:
        yield (
            f"actor.lora.targets: model_type={sizes.get('model_type')} has no "
            f"{', '.join(missing)}{_why(missing, has, sizes)}; choose from {', '.join(has)}, or "
            "leave the targets empty to adapt all of them except routed experts"
        )


def _why(missing: Sequence[str], has: Sequence[str], sizes: Mapping[str, Any]) -> str:
    if not derived.num_experts(sizes):
        return ""
    if any(target.startswith("experts.") for target in missing):
        return ", because its experts are not separate linear layers"
    if any(f"experts.{target}" in has for target in missing):
        return ", because its MLPs are routed experts"
    return ""
