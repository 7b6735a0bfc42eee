"""Check before startup that a run's models can be sharded as configured, using each family's own
rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config import derived
from hybridflow.config.model_config import VISION_MODELS
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import ModelConfig, ParallelConfig, RunConfig
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.blocks import Experts
from hybridflow.models.decoder import Decoder
from hybridflow.models.delta_net import check_context, has_delta_net
from hybridflow.models.family import Family, family_of, num_prediction_heads, use_family
from hybridflow.models.fused_experts import FusedExperts
from hybridflow.models.layout import ParallelShape
from hybridflow.models.model_folder import check_weights
from hybridflow.models.recompute import check_recompute
from hybridflow.models.served import check_served
from hybridflow.models.vision import check_training, check_vision, tower_of


def check(config: RunConfig, job: str = "train") -> None:
    """Check all models of `hybridflow train`, `sft` or `train-reward`.

    Raises:
        ConfigError: a model cannot be sharded as configured, or its weights folder is incomplete;
            one line per problem.
    """
    use_family(config.model.family)
    if found := list(dict.fromkeys(problems(config, job))) or list(
        dict.fromkeys(_folder_problems(config, job))
    ):
        raise ConfigError("\n".join(found))
    for name in config.roles if job == "train" else ():
        try:
            check(derived.policy_view(config, name), job)
        except ConfigError as error:
            raise ConfigError(f"roles.{name}: {error}") from error


def _folder_problems(config: RunConfig, job: str) -> Iterator[str]:
    """Yield one line for each incomplete weights folder."""
    for role, model in _models(config, job):
        is_policy = role == "actor"
        if model.path is None or (model is config.model and not is_policy):
            continue  # the policy's folder is checked once
        try:
            # a missing scalar head is newly initialised
            has_head = is_policy or ROLES[role].head == "vocabulary"
            hf = {"vocab_size": 1, **derived.run_hf_config(config, model)}
            mtp = is_policy and config.actor.mtp.train
            family = family_of(hf, mtp=mtp) if has_head else None
            check_weights(Path(model.path), family.tensors() if family else ())
        except ModelError as error:
            yield str(error)


def problems(config: RunConfig, job: str = "train") -> Iterator[str]:
    """Yield one line for each role whose model cannot be sharded as configured."""
    for role, model in _models(config, job):
        parallel = config.actor.parallel if role == "actor" else derived.role_layout(config, role)
        try:
            hf = derived.run_hf_config(config, model)
            mtp = role == "actor" and config.actor.mtp.train
            check_cut(hf, parallel, mtp)
            family = family_of({"vocab_size": 1, **hf})
            if role == "actor":
                _check_policy(family, config, job)
            else:
                _check_role(family, role, config)
            trains = derived.trains(config, role) or job == "train-reward"
            if trains and config.actor.backend == "megatron":
                check_recompute(family, config.actor.recompute, config.actor.recompute_modules)
        except ModelError as error:
            section = "actor" if role == "actor" else derived.layout_section(config, role)
            yield str(error).replace("actor.parallel", f"{section}.parallel")


def _check_policy(family: Family, config: RunConfig, job: str) -> None:
    actor = config.actor
    if actor.backend == "fsdp":
        check_fsdp(family)
    if job == "train":
        check_served(family, config)
    check_training(family, actor.recompute, frozen=actor.freeze_vision_tower)


def _check_role(family: Family, role: str, config: RunConfig) -> None:
    has_head = ROLES[role].head == "vocabulary"
    key = config.data.image_key
    kind = f"model_type {family.hf['model_type']!r} of the {role.replace('_', ' ')}"
    if tower_of(family) is None and has_head and key is not None:
        raise ModelError(
            f"data.image_key={key}, but {kind} has no vision tower; set {role}.path to "
            f"{VISION_MODELS}"
        )
    if tower_of(family) is not None and not has_head:
        raise ModelError(
            f"{kind} has a vision tower, which is not supported in this role; set {role}.path to a "
            "text model, or choose an algorithm without this role"
        )


def check_fsdp(family: Family) -> None:
    """Raise ModelError if the FSDP backend cannot train a model.

    The backend builds causal language models without a vision tower. It does not support sliding
    windows, because it replaces transformers' attention mask, which implements them, with a mask
    for packed rows. It does not support delta nets, because in transformers their state would carry
    over from one packed row to the next. It does not support expert biases, because they are
    buffers and FSDP2 shards only parameters.
    """
    megatron = "by actor.backend=fsdp; set actor.backend=megatron"
    named = f"model_type {family.hf['model_type']!r}"
    if tower_of(family) is not None:
        raise ModelError(f"{named} has a vision tower, which is not supported {megatron}")
    if has_delta_net(family):
        raise ModelError(f"{named} has gated delta nets, which are not supported {megatron}")
    if any(getattr(family, "windows", ())):
        raise ModelError(f"sliding_window is not supported {megatron}")
    if isinstance(family, Decoder):
        mlps = [family.mlp(layer) for layer in range(family.num_layers)]
        if any(isinstance(mlp, FusedExperts) for mlp in mlps):
            raise ModelError(f"{named} has experts with biases, which are not supported {megatron}")
        if any(isinstance(mlp, Experts) and mlp.expert_bias for mlp in mlps):
            raise ModelError(f"{named} has expert biases, which are not supported {megatron}")


def check_cut(hf_config: Mapping[str, Any], parallel: ParallelConfig, mtp: bool = False) -> None:
    """Raise ModelError if a model with this config cannot be sharded as specified by `parallel`.
    The vocabulary may have any size, because it is padded. With `mtp`, also raise ModelError if the
    model has no multi-token-prediction heads.
    """
    family = family_of({"vocab_size": 1, **hf_config}, mtp=mtp)
    if mtp and not num_prediction_heads(family):
        raise ModelError(
            f"actor.mtp.train=true: model_type {hf_config.get('model_type')!r} has no multi-token-"
            "prediction heads that can be trained, according to its config.json "
            "(docs/prediction-heads.md); set it to false"
        )
    family.check(ParallelShape.of(parallel, derived.model_parallel_size(parallel)).place())
    check_context(family, parallel)
    check_vision(family, parallel)


def _models(config: RunConfig, job: str) -> Iterator[tuple[str, ModelConfig]]:
    yield "actor", config.model
    for role in derived.models_in_use(config, job):
        if role != "actor":
            path = None if job == "train-reward" else getattr(config, role).path
            yield role, config.model if path is None else ModelConfig(path=path)
