"""Checks for settings that `data.image_key` does not support. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.config import derived, hub
from hybridflow.config.model_config import MULTIMODAL, VISION_MODELS
from hybridflow.config.schema import RolloutConfig, RunConfig

_SERVER = RolloutConfig().engine  # the only server that receives images


def problems(config: RunConfig, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per problem. `sizes` is the model's config; empty if it cannot be read."""
    data = config.data
    if data.image_key is None:
        return
    key = f"data.image_key={data.image_key}"
    path = config.model.path or ""
    if isinstance(whole := sizes.get(MULTIMODAL), Mapping):
        yield (
            f"{key}, but only the text model of model_type={whole.get('model_type')} can be "
            f"trained; set model.path to {VISION_MODELS}, or data.image_key=null to train on the "
            "text alone"
        )
    elif sizes and not sizes.get("vision_config") and hub.is_hub_id(path):
        yield (
            f"{key}: model.hf_config has only the sizes of a text model, "
            f"{sizes.get('model_type')}, and model.path={path} is not in the hub's cache; run "
            f"`hf download {path}` first, or set data.image_key=null to plan with text alone"
        )
    elif sizes and not sizes.get("vision_config"):
        yield (
            f"{key}, but model_type={sizes.get('model_type')} has no vision tower (vision_config "
            f"in config.json); set model.path to {VISION_MODELS}, or data.image_key=null to train "
            "on the text alone"
        )
    engine = config.rollout.engine
    if derived.generates(config) and not config.cluster.in_process and engine != _SERVER:
        yield f"{key}: rollout.engine={engine} does not receive images; set it to {_SERVER}"
    if data.answers == "pairs":
        yield f"{key} is not supported with data.answers=pairs; set one of them to its default"
    if config.trainer.rollouts_from is not None:
        yield f"{key}: dumps do not contain images; set trainer.rollouts_from=null"
    if data.truncation != "error" and not data.filter_overlong_prompts:
        yield (
            f"{key}: data.truncation={data.truncation} would cut images; set it to error, or "
            "data.filter_overlong_prompts=true"
        )
    if config.sft.steps and config.sft.messages_key is not None:
        yield f"{key} is not supported with sft.messages_key; set it to null"
