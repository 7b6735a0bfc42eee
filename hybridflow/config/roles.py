"""Checks of the settings of roles other than the policy (critic, reference, reward model, teacher),
and of sections that share devices. Part of `config.check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridflow.config import check_entries, derived, hub
from hybridflow.config.derived import Role
from hybridflow.config.outside_json import read_outside_json
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import ModelConfig, OffloadConfig, ParallelConfig, RunConfig
from hybridflow.errors import ConfigError


def problems(config: RunConfig, job: str, files: bool = True) -> list[str]:
    """Return one line for each problem that affects `hybridflow train` or `train-reward`. Missing
    folders are reported only if `files` is set.
    """
    found: list[str] = []
    if job == "train":
        found += [
            *_steering(config),
            *_distillation(config),
            *check_entries.sample_problems(config),
            *check_entries.loss_problems(config),
            *check_entries.flow_problems(config),
            *check_entries.preference_problems(config),
            *check_entries.recorded_problems(config),
        ]
        for name in derived.models_in_use(config):
            if name != "actor":
                found += _role(config, name, files)
        critics = derived.critics(config)
        for name in critics:
            found += _critic_batches(config, name)
        if config.trainer.critic_warmup and not critics and not config.trainer.rollout_only:
            found.append(
                f"trainer.critic_warmup={config.trainer.critic_warmup} requires a critic; set "
                "algorithm.adv_estimator=gae or critic_warmup=0"
            )
        if derived.needs_reference(config):
            found += _other_model(config)
        if derived.has_teacher(config) and files:
            found += _top_k(config)
    if job == "train-reward" and config.reward_training.steps:
        found += [*_role(config, "reward_model", with_path=False), *_pairs(config)]
    if job == "train" and config.reward_model.trains:
        found += _pair_budget(config)
    return found


def _steering(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    trainer = config.trainer
    if algorithm.kl_target is not None and not algorithm.kl_coef:
        yield (
            f"algorithm.kl_target={algorithm.kl_target} adapts algorithm.kl_coef, which is 0; set "
            "kl_coef above 0, or kl_target=null"
        )
    steps = derived.total_steps(config, None)
    if steps is not None and trainer.critic_warmup >= steps and derived.critics(config):
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} leaves no step of "
            f"trainer.total_steps={steps} to train the policy; reduce it"
        )


def _distillation(config: RunConfig) -> Iterator[str]:
    distillation = config.actor.distillation
    if distillation.coef and not derived.has_teacher(config):
        yield (
            f"actor.distillation.coef={distillation.coef:g} requires a teacher; set teacher.path "
            "to the Hugging Face folder of a model with the policy's vocabulary, or coef=0"
        )
    if not distillation.task_rewards and not distillation.coef:
        yield (
            "actor.distillation.task_rewards=false with actor.distillation.coef=0: nothing would "
            "be trained; set coef to 1, or task_rewards=true"
        )


def _role(config: RunConfig, role: str, with_path: bool = True) -> Iterator[str]:
    section: Role = getattr(config, role)
    longest = derived.max_sequence_length(config)
    if section.max_tokens_per_micro_batch < longest:
        yield (
            f"{role}.max_tokens_per_micro_batch={section.max_tokens_per_micro_batch} is less than "
            f"the longest sample, {longest} tokens; raise it to at least {longest}"
        )
    if with_path and section.path is not None and hub.is_hub_id(section.path):
        yield (
            f"{role}.path={section.path}: {hub.missing(section.path, 'model')}, or set it to a "
            "Hugging Face folder"
        )
    elif (
        with_path
        and section.path is not None
        and not (Path(section.path) / "config.json").is_file()
    ):
        maker = "train-reward" if role == "reward_model" else "sft"
        yield (
            f"{role}.path={section.path}: not a Hugging Face folder (config.json not found); set a "
            f"model's folder, or create one first: `hybridflow {maker} --help`"
        )
    elif with_path and section.path is not None:
        yield from _vocabulary(config, role, section.path)
    yield from _layout(section, role)
    reads_last_token = with_path and ROLES[role].head == "score"
    context = config.actor.parallel.context
    if reads_last_token and section.placement == "colocated" and context > 1:
        yield (
            f"{role}.placement=colocated with actor.parallel.context={context} is not supported: a "
            f"sample's last token may be on any context rank; set {role}.placement=own"
        )


def _layout(section: Role, role: str) -> Iterator[str]:
    parallel = section.parallel
    if section.placement == "colocated":
        if parallel != ParallelConfig():
            yield (
                f"{role}.parallel has no effect with {role}.placement=colocated, because colocated "
                f"roles use the layout actor.parallel; remove it, or set {role}.placement=own"
            )
        return
    size = derived.model_parallel_size(parallel)
    expert = derived.expert_model_parallel_size(parallel)
    cut_experts = parallel.expert > 1 or parallel.expert_tensor is not None
    for what, parts, counts in (
        ("tensor x pipeline x context", size, True),
        ("expert x expert_tensor x pipeline", expert, cut_experts),
    ):
        if counts and section.procs % parts:
            yield (
                f"{role}.parallel {what} = {parts} does not divide {role}.procs={section.procs}; "
                f"use a multiple of {parts}"
            )
    if parallel.context > 1 or parallel.virtual_pipeline is not None:
        yield (
            f"{role}.parallel supports neither context nor virtual_pipeline, got "
            f"context={parallel.context} and virtual_pipeline={parallel.virtual_pipeline}"
        )
    if parallel.sequence and parallel.tensor == 1:
        yield f"{role}.parallel.sequence=true requires {role}.parallel.tensor > 1"


def _other_model(config: RunConfig) -> Iterator[str]:
    """Check that a colocated reference uses the policy's model, because it is stored as a second
    set of the policy's weights."""
    reference = config.reference
    if reference.placement != "colocated":
        return
    if reference.path is not None:
        yield (
            f"reference.path={reference.path} with reference.placement=colocated: another model "
            "requires separate processes; set reference.placement=own"
        )
    if reference.offload != OffloadConfig():
        yield (
            "reference.offload has no effect with reference.placement=colocated, because a "
            "colocated reference uses actor.offload.weights; set that key, or "
            "reference.placement=own"
        )


def _vocabulary(config: RunConfig, role: str, path: str) -> Iterator[str]:
    """Check that the policy's token ids have the same meaning in the role's model and fit its
    embedding.

    A teacher's vocabulary must be identical, because the policy learns from the teacher's most
    likely tokens.
    """
    own = _tokens(path)
    policy = _tokens(config.model.tokenizer or config.model.path)
    if own and policy and own != policy:
        other = sum(policy.get(token) != index for token, index in own.items())
        yield (
            f"{role}.path={path} has a different tokenizer ({other} of its {len(own)} tokens have "
            "different ids than the policy's), so it would decode the policy's answers to "
            "different text; use a model with the policy's tokenizer"
        )
        return
    size = _vocab_size(ModelConfig(path=path))
    needed = _vocab_size(config.model) or len(policy) or None
    if size is None or needed is None or size == needed or (size > needed and role != "teacher"):
        return
    yield (
        f"{role}.path={path} has vocab_size={size}, but the policy has {needed}: both models must "
        "have the same vocabulary; use another model"
    )


def _top_k(config: RunConfig) -> Iterator[str]:
    path = config.teacher.path
    top_k = config.teacher.top_k
    size = _vocab_size(ModelConfig(path=path))
    if size is not None and top_k > size:
        yield (
            f"teacher.top_k={top_k} is more than the {size} tokens in the vocabulary of "
            f"teacher.path={path}; reduce it"
        )


def _vocab_size(model: ModelConfig) -> int | None:
    """Return the vocabulary size; None if the config does not specify it, or its folder is missing
    (reported elsewhere)."""
    try:
        size = derived.hf_config(model).get("vocab_size")
    except ConfigError:
        return None
    return size if isinstance(size, int) else None


def _tokens(folder: str | None) -> dict[str, int]:
    """Return {token: id} from the tokenizer.json in a folder; empty if it is missing or
    unreadable."""
    try:
        values = read_outside_json(Path(folder or "") / "tokenizer.json")
        vocabulary = values["model"]["vocab"]
        if isinstance(vocabulary, dict):
            found = dict(vocabulary)
        else:
            found = {entry[0]: number for number, entry in enumerate(vocabulary)}
        for token in values.get("added_tokens", ()):
            found[token["content"]] = token["id"]
        return found
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def _critic_batches(config: RunConfig, role: str) -> Iterator[str]:
    batch = config.data.train_batch_size
    mini = derived.role_mini_batch_size(config, role)
    if batch % mini:
        yield (
            f"data.train_batch_size={batch} is not a multiple of {role}.ppo_mini_batch_size={mini} "
            "(both count prompts)"
        )
    dp = derived.role_data_parallel_size(config, role)
    samples = derived.role_samples_per_mini_batch(config, role)
    if dp and samples % dp:
        yield (
            f"{role}.ppo_mini_batch_size={mini} x rollout.n={config.rollout.n} = {samples} samples "
            f"cannot be divided evenly across {dp} ranks"
        )


def _pair_budget(config: RunConfig) -> Iterator[str]:
    longest = derived.max_sequence_length(config)
    budget = config.reward_model.max_tokens_per_micro_batch
    if budget < 2 * longest:
        yield (
            f"reward_model.max_tokens_per_micro_batch={budget} is less than two samples of "
            f"{longest} tokens; both answers of a pair must fit in one micro-batch; raise it to at "
            f"least {2 * longest}"
        )


def _pairs(config: RunConfig) -> Iterator[str]:
    yield from _pair_budget(config)
    dp = derived.role_data_parallel_size(config, "reward_model")
    if dp and config.reward_training.batch_size % dp:
        yield (
            f"reward_training.batch_size={config.reward_training.batch_size} pairs cannot be "
            f"divided evenly across {dp} data-parallel ranks"
        )


def pool_problems(config: RunConfig, job: str) -> Iterator[str]:
    """Reject pools that no section creates, and pool keys that have no effect. Whether the pools
    fit the cluster is checked in `placement`.
    """
    roles = derived.roles_in_use(config, job)[1:]
    apart = [
        *(role for role in roles if not derived.is_colocated(config, role)),
        *(["rollout"] * (job == "train")),
    ]
    makers = ["actor", *(name for name in apart if getattr(config, name).pool is None)]
    for name in roles:
        own = getattr(config, name)
        if name not in apart and (own.pool is not None or own.packing != "pack"):
            yield (
                f"{name}.pool and {name}.packing apply to separate processes, but "
                f"{name}.placement=colocated; remove them, or set {name}.placement=own"
            )
    for name in apart:
        pool = getattr(config, name).pool
        packing = getattr(config, name).packing
        if pool is not None and pool not in makers:
            yield (
                f"{name}.pool={pool}: that section has no separate devices in this run; choose one "
                f"of {', '.join(makers)}, or null"
            )
        elif pool is not None and packing != "pack":
            yield (
                f"{name}.packing={packing} has no effect with {name}.pool={pool}, because it uses "
                f"the devices of {pool}; remove packing, or set {name}.pool=null"
            )
