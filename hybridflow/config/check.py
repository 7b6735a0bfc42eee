"""Cross-field checks for invalid combinations of individually valid keys. Does not import torch.
The checks run before anything starts. All problems are reported together, each with the keys, their
values and a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config import (
    check_agent,
    check_backend,
    check_engines,
    check_entries,
    check_files,
    check_images,
    check_in_process,
    check_loop,
    check_lora,
    check_sampling,
    derived,
    hub,
    own_entries,
    own_roles,
    roles,
    val_sets,
)
from hybridflow.config.keys import out_of_range, value_at
from hybridflow.config.locate import config_dirs, list_recipes, model_groups
from hybridflow.config.role_table import CRITICS
from hybridflow.config.schema import OptimConfig, RunConfig
from hybridflow.errors import ConfigError


def check(config: RunConfig, job: str = "train") -> None:
    """Raise a single ConfigError that lists every problem that would prevent `hybridflow train`,
    `sft` or `train-reward` from running this configuration.
    """
    found = problems(config, job)
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(
            f"{len(found)} problems in the configuration:\n"
            + "\n".join(f"  - {line}" for line in found)
        )


def problems(config: RunConfig, job: str = "train", files: bool = True) -> list[str]:
    """Return one line per problem; an empty list if the configuration can run.

    Args:
        files: also check that the run's input files and folders exist. `hybridflow plan` sets it to
            False.
    """
    found = [*out_of_range(config), *_names(config)]
    found += own_entries.problems(config) if files else []
    if not found:  # a missing file is reported once
        found = [*check_entries.problems(config), *val_sets.problems(config)]
    if found:
        # the checks below divide by these numbers and look up these entries
        return found
    checks: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
        *(_layout, _overlap, _sequence_parallel, _batches, _lengths, _model_source),
        *(
            check_engines.shape_problems,
            check_engines.drafting_problems,
            check_backend.problems,
            check_in_process.problems,
            check_lora.problems,
        ),
        *(
            check_agent.problems,
            check_loop.length_problems,
            check_loop.staleness_problems,
            check_loop.dump_problems,
            check_loop.profile_problems,
        ),
        check_sampling.problems,
    )
    found = []
    for one in checks:
        found.extend(one(config))
    sizes, unreadable = _read_sizes(config)
    found += [*roles.problems(config, job, files), *roles.pool_problems(config, job)]
    for section in ("actor", "sft", *CRITICS.values(), "reward_model", "reward_training"):
        found += _optim(f"{section}.optim", getattr(config, section).optim, config.model.dtype)
    found += check_entries.library_problems(config) if files else []
    found += [*check_files.problems(config, job), *_model_folder(config)] if files else []
    found += _other_sizes(config, sizes)
    if not any(line.startswith("model.") for line in found):
        found += unreadable or _model_sizes(config, sizes)
        found += [
            *_router_replay(config, sizes),
            *_router_losses(config, sizes),
            *check_lora.target_problems(config, sizes),
            *check_images.problems(config, sizes),
        ]
    found += own_roles.problems(config, job, lambda view: problems(view, job, files))
    return found


def _read_sizes(config: RunConfig) -> tuple[Mapping[str, Any], list[str]]:
    """Read the model's config. Returns (config, []) or, if it cannot be read, ({}, [problem])."""
    try:
        return derived.run_hf_config(config), []
    except ConfigError as error:
        return {}, [str(error)]


def _names(config: RunConfig) -> Iterator[str]:
    if config.name in ("", ".", "..") or "/" in config.name:
        yield (
            f"name={config.name!r} names the run folder inside output_dir={config.output_dir}: use "
            "a plain folder name"
        )


def _layout(config: RunConfig) -> Iterator[str]:
    """Check the parallel sizes against the number of processes."""
    world = derived.world_size(config)
    parallel = config.actor.parallel
    cluster = config.cluster
    processes = (
        f"cluster.nodes={cluster.nodes} x cluster.procs_per_node={cluster.procs_per_node} = "
        f"{world} processes"
    )
    dense = derived.model_parallel_size(parallel)
    if world % dense:
        yield (
            f"actor.parallel tensor={parallel.tensor} x pipeline={parallel.pipeline} x "
            f"context={parallel.context} = {dense} does not divide {processes}; change the "
            f"parallel sizes or use a multiple of {dense} processes"
        )
    etp = derived.expert_tensor_size(parallel)
    expert = derived.expert_model_parallel_size(parallel)
    if world % expert and (parallel.expert > 1 or parallel.expert_tensor is not None):
        default = "" if parallel.expert_tensor else " (the default)"
        yield (
            f"actor.parallel expert={parallel.expert} x expert_tensor={etp}{default} x "
            f"pipeline={parallel.pipeline} = {expert} does not divide {processes}; change expert "
            f"or expert_tensor, or use a multiple of {expert} processes"
        )
    if parallel.pipeline == 1 and derived.virtual_pipeline_size(parallel) > 1:
        yield (
            f"actor.parallel.virtual_pipeline={parallel.virtual_pipeline} requires "
            "actor.parallel.pipeline > 1; set it to null"
        )


def _overlap(config: RunConfig) -> Iterator[str]:
    """Check the settings that overlap data-parallel communication with computation."""
    parallel = config.actor.parallel
    if parallel.overlap_param_gather and not parallel.distributed_optimizer:
        yield (
            "actor.parallel.overlap_param_gather=true requires "
            "actor.parallel.distributed_optimizer=true: without it every rank has all weights and "
            "there is nothing to gather; set distributed_optimizer to true or overlap_param_gather "
            "to false"
        )
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        yield (
            "actor.parallel.overlap_param_gather=true requires "
            "actor.parallel.overlap_grad_reduce=true: without it all weights are in one bucket, "
            "which leaves nothing to overlap; set overlap_grad_reduce to true"
        )


def _sequence_parallel(config: RunConfig) -> Iterator[str]:
    parallel = config.actor.parallel
    if parallel.sequence and parallel.tensor == 1:
        yield (
            "actor.parallel.sequence=true requires actor.parallel.tensor > 1; set sequence to "
            "false or tensor to 2 or more"
        )


def _batches(config: RunConfig) -> Iterator[str]:
    batch = config.data.train_batch_size
    mini = config.actor.ppo_mini_batch_size
    n = config.rollout.n
    if batch % mini:
        yield (
            f"data.train_batch_size={batch} is not a multiple of actor.ppo_mini_batch_size={mini} "
            f"(both count prompts); choose a mini-batch that divides {batch}"
        )
    dp = derived.data_parallel_size(config)
    samples = derived.samples_per_mini_batch(config)
    if dp and samples % dp:
        yield (
            f"actor.ppo_mini_batch_size={mini} x rollout.n={n} = {samples} samples per update "
            f"cannot be divided evenly across {dp} data-parallel ranks; make it a multiple of {dp}"
        )
    if dp and config.sft.steps and config.sft.batch_size % dp:
        yield (
            f"sft.batch_size={config.sft.batch_size} cannot be divided evenly across {dp} "
            f"data-parallel ranks; make it a multiple of {dp}"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
    longest = derived.max_sequence_length(config)
    data = config.data
    total = (
        f"data.max_prompt_length={data.max_prompt_length} + "
        f"data.max_response_length={data.max_response_length} = {longest}"
    )
    parallel = config.actor.parallel
    budget = config.actor.max_tokens_per_micro_batch
    padded = derived.padded_length(longest, parallel)
    if budget >= longest and budget < padded:
        yield (
            f"actor.max_tokens_per_micro_batch={budget} is less than {padded} tokens: {total}, "
            f"padded to a multiple of 2 x actor.parallel.context={parallel.context}; raise it to "
            f"at least {padded}"
        )
    limits = {
        "actor.max_tokens_per_micro_batch": (
            longest,
            "the longest sample must fit in one micro-batch",
        ),
        "rollout.max_total_tokens": (
            longest,
            "the longest sample must fit in an engine's KV cache",
        ),
    }
    if margin := derived.engine_margin(config):
        why = (
            f"the longest sample must fit in an engine's KV cache, whose last {margin} tokens "
            "cannot contain a prompt"
        )
        limits["rollout.max_total_tokens"] = longest + margin, why
    for key, (least, why) in limits.items():
        limit = value_at(config, key)
        if limit < least:
            yield (
                (
                    f"{key}={limit} is less than {total} tokens; {why}: raise it to at least "
                    f"{least} or shorten the lengths"
                )
                if least == longest
                else (
                    f"{key}={limit} is less than {total} tokens + {margin}; {why}: raise it to at "
                    f"least {least} or shorten the lengths"
                )
            )
    for name, given in config.rollout.extra_args.items():
        is_context = name.replace("-", "_") in ("context_length", "max_model_len")
        if is_context and isinstance(given, int) and given < longest + margin:
            rest = f" tokens + {margin}" if margin else " tokens"
            yield (
                f"rollout.extra_args.{name}={given} is less than {total}{rest}; the longest sample "
                f"must fit the engine's context: raise it to at least {longest + margin}"
            )


def _optim(prefix: str, optim: OptimConfig, dtype: str) -> Iterator[str]:
    if optim.precision_aware and dtype != "bfloat16":
        yield (
            f"{prefix}.precision_aware=true requires model.dtype=bfloat16: {dtype} weights have no "
            "separate main weights"
        )
    for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if not optim.precision_aware and getattr(optim, key) != "float32":
            yield (
                f"{prefix}.{key}={getattr(optim, key)} requires {prefix}.precision_aware=true; set "
                "it, or use float32"
            )
    if optim.min_lr > optim.lr:
        yield f"{prefix}.min_lr={optim.min_lr} must be at most {prefix}.lr={optim.lr}"
    if optim.lr_decay_style != "constant" and optim.lr_decay_steps is None:
        yield (
            f"{prefix}.lr_decay_style={optim.lr_decay_style} requires {prefix}.lr_decay_steps "
            "(optimizer updates)"
        )
    if optim.lr_decay_steps is not None and optim.lr_decay_steps <= optim.lr_warmup_steps:
        yield (
            f"{prefix}.lr_decay_steps={optim.lr_decay_steps} must be more than "
            f"{prefix}.lr_warmup_steps={optim.lr_warmup_steps}"
        )


def _model_source(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.path is None and not model.hf_config:
        yield (
            "model.path and model.hf_config are both empty; set model.path=FOLDER to load weights, "
            "or model.hf_config to start from random weights"
        )
    if model.path is None and model.hf_config and "model_type" not in model.hf_config:
        yield (
            "model.hf_config must contain model_type, which selects the family, for example "
            "model.hf_config.model_type=qwen3"
        )


def _model_folder(config: RunConfig) -> Iterator[str]:
    """Check the model and tokenizer folders."""
    model = config.model
    if model.path is not None and hub.is_hub_id(model.path):
        yield (
            f"model.path={model.path}: {hub.missing(model.path, 'model')}, or set it to a Hugging "
            "Face folder"
        )
    elif model.path is not None and not Path(model.path).is_dir():
        yield (
            f"model.path={model.path}: folder not found; it must be a Hugging Face folder with "
            "config.json and weights"
        )
    if model.tokenizer is None and model.path is None:
        yield (
            "model.tokenizer is empty and there is no model.path to load it from; set "
            "model.path=FOLDER to load weights and a tokenizer, or model.tokenizer=FOLDER to start "
            "from random weights"
        )
    if model.tokenizer is not None and hub.is_hub_id(model.tokenizer):
        if not check_files.available(config, model.tokenizer):
            yield f"model.tokenizer={model.tokenizer}: {hub.missing(model.tokenizer, 'model')}"
    elif model.tokenizer is not None and not check_files.available(config, model.tokenizer):
        yield f"model.tokenizer={model.tokenizer}: folder not found"
    elif model.tokenizer is not None and Path(model.tokenizer).is_file():
        yield (
            f"model.tokenizer={model.tokenizer} is a file; set it to the folder that contains the "
            "tokenizer"
        )


def _other_sizes(config: RunConfig, sizes: Mapping[str, Any]) -> list[str]:
    """Check that the model folder's config.json has the sizes given in the recipe. If not, suggest
    recipes for that model.
    """
    model = config.model
    differing = derived.differing_size(model.hf_config, sizes) if model.path is not None else None
    if differing is None:
        return []
    name, wanted, other = differing
    found = recipes_for(sizes)
    instead = (
        f"use a recipe for that model (--config-name {' or '.join(found)})"
        if found
        else "set the recipe's model folder"
    )
    return [
        (
            f"model.path={model.path} is not the recipe's model: its config.json has "
            f"{name}={other}, but model.hf_config has {wanted}; {instead}, or remove the recipe's "
            "sizes (~model.hf_config)"
        )
    ]


def recipes_for(sizes: Mapping[str, Any]) -> list[str]:
    """Return the names of the recipes for the model with this config.json."""
    dirs = config_dirs(None)
    fitting = []
    for group, values in model_groups(dirs):
        if derived.differing_size(values, sizes) is None:
            fitting.append(group)
    names: list[str] = []
    for recipe in list_recipes(dirs):
        if any(f"-{group}-" in recipe.name for group in fitting):
            names.append(recipe.name)
    return names


def _model_sizes(config: RunConfig, sizes: Mapping[str, Any]) -> list[str]:
    """Check the model's sizes against the engines and the length limits. The trainer's layout is
    checked by `hybridflow.models.check`, for each family.
    """
    tensor = config.actor.parallel.tensor
    experts = derived.num_experts(sizes)
    found = [] if experts else [*_dense_problems(config)]
    if experts and tensor > 1 and not config.actor.parallel.sequence:
        found.append(
            f"actor.parallel.tensor={tensor} with experts (num_experts={experts}) requires "
            "actor.parallel.sequence=true: Megatron requires sequence parallelism to train a "
            "mixture of experts with tensor parallelism"
        )
    if experts and config.actor.parallel.moe_dispatcher == "deepep":
        found += _deepep_problems(config)
    if not any(True for _ in check_engines.shape_problems(config)):
        found += check_engines.size_problems(config.rollout, sizes)
    return found + list(_positions(config, sizes))


def _dense_problems(config: RunConfig) -> Iterator[str]:
    parallel = config.actor.parallel
    if (expert := parallel.expert) > 1:
        yield (
            f"actor.parallel.expert={expert} requires a mixture of experts, but the model has no "
            "num_experts; set it to 1"
        )
    if parallel.expert_tensor not in (None, parallel.tensor):
        yield (
            f"actor.parallel.expert_tensor={parallel.expert_tensor} requires a mixture of experts, "
            "but the model has no num_experts; set it to null"
        )


def _deepep_problems(config: RunConfig) -> Iterator[str]:
    """Check that experts are sharded across ranks, as Megatron's flex dispatcher requires
    (token_dispatcher.py:1346)."""
    if config.actor.parallel.expert * derived.expert_tensor_size(config.actor.parallel) == 1:
        yield (
            "actor.parallel.moe_dispatcher=deepep sends tokens between ranks, but with expert=1 "
            "every rank has all experts; set actor.parallel.expert above 1, or "
            "moe_dispatcher=alltoall"
        )


def _positions(config: RunConfig, sizes: Any) -> Iterator[str]:
    limit = sizes.get("max_position_embeddings")
    prompt = config.data.max_prompt_length
    margin = derived.engine_margin(config)
    rest = (
        f" + {margin}, because an engine rejects a prompt that reaches into the last {margin} "
        "tokens of its context"
        if margin
        else ""
    )
    answers = {"data.max_response_length": config.data.max_response_length}
    for key, one in check_sampling.sampled(config).items():
        answers[f"{key}.max_new_tokens"] = getattr(one, "max_new_tokens", None) or 0
    for key, most in answers.items():
        if isinstance(limit, int) and limit < prompt + most + margin:
            yield (
                f"the model's max_position_embeddings={limit} is less than data.max_prompt_length "
                f"+ {key} = {prompt + most}{rest}; shorten the lengths"
            )


def _router_losses(config: RunConfig, sizes: Mapping[str, Any]) -> Iterator[str]:
    actor = config.actor
    keys = []
    for key in ("router_aux_loss_coef", "router_z_loss_coef"):
        if getattr(actor, key):
            keys.append(key)
    if not keys or actor.backend == "fsdp":  # rejected by the backend
        return
    named = " and ".join(f"actor.{key}={getattr(actor, key)}" for key in keys)
    if sizes and not derived.num_experts(sizes):
        yield (
            f"{named}: router losses require a mixture of experts, but the model is dense; set "
            "them to 0"
        )
    if actor.lora.rank:
        yield (
            f"{named} with actor.lora.rank={actor.lora.rank}: adapters do not train routers; set "
            "one of the two to 0"
        )
    if actor.rollout_correction.reject:
        yield (
            f"{named} with actor.rollout_correction.reject={actor.rollout_correction.reject}: the "
            "weight of router losses depends on how many tokens the policy loss includes, which is "
            "unknown until tokens have been rejected; remove one of the two"
        )


def _router_replay(config: RunConfig, sizes: Mapping[str, Any]) -> Iterator[str]:
    kind = config.actor.router_replay
    if kind != "none" and sizes and not derived.num_experts(sizes):
        yield (
            f"actor.router_replay={kind} requires a mixture of experts, but the model is dense; "
            "set it to none"
        )
    given = {}
    for name, value in config.rollout.extra_args.items():
        given[name.replace("_", "-")] = value
    if (
        derived.needs_engine_routes(config)
        and given.get("enable-return-routed-experts", True) is not True
    ):
        yield (
            f"actor.router_replay={kind} requires the engine argument "
            "enable-return-routed-experts, but rollout.extra_args disables it; remove it from "
            "rollout.extra_args"
        )
