"""Values derived from a configuration. The configuration itself is never modified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config import hub
from hybridflow.config.entries import ESTIMATORS, FLOWS, POLICY_LOSSES
from hybridflow.config.model_config import (
    TEXT_TYPES,
    flattened,
    read_model_config,
    with_tower,
    wrong_fields,
)
from hybridflow.config.role_table import CRITICS, ROLES
from hybridflow.config.schema import (
    CriticConfig,
    ModelConfig,
    ParallelConfig,
    ReferenceConfig,
    RewardModelConfig,
    RunConfig,
    SftConfig,
    TeacherConfig,
)
from hybridflow.errors import ConfigError

Role = CriticConfig | ReferenceConfig | RewardModelConfig | TeacherConfig

_PROMPT_MARGIN = 6  # the maximum over the kinds of engines


def world_size(config: RunConfig) -> int:
    """Return the number of Megatron processes."""
    return config.cluster.nodes * config.cluster.procs_per_node


def model_parallel_size(parallel: ParallelConfig) -> int:
    """Return the number of processes that together hold one copy of the non-expert weights."""
    return parallel.tensor * parallel.pipeline * parallel.context


def virtual_pipeline_size(parallel: ParallelConfig) -> int:
    """Return the number of model chunks per pipeline rank; 1 without interleaving."""
    return parallel.virtual_pipeline or 1


def tokens_multiple(parallel: ParallelConfig) -> int:
    """Return the multiple to which sequences are padded. Context parallelism splits a sequence into
    2 x context chunks (zigzag)."""
    return 2 * parallel.context if parallel.context > 1 else 1


def padded_length(tokens: int, parallel: ParallelConfig) -> int:
    """Return the padded length of a sequence in a micro-batch."""
    return -(-tokens // tokens_multiple(parallel)) * tokens_multiple(parallel)


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """Return the tensor-parallel size within an expert, including its default."""
    if parallel.expert_tensor is not None:
        return parallel.expert_tensor
    return 1 if parallel.expert > 1 else parallel.tensor


def expert_model_parallel_size(parallel: ParallelConfig) -> int:
    """Return the number of processes that together hold one copy of the expert weights."""
    return parallel.expert * expert_tensor_size(parallel) * parallel.pipeline


def data_parallel_size(config: RunConfig) -> int:
    """Return the number of model replicas among which a batch is divided."""
    return world_size(config) // model_parallel_size(config.actor.parallel)


def num_experts(sizes: Mapping[str, Any]) -> int:
    """Return the number of routed experts in a model's HF config (of any family); 0 for a dense
    model."""
    return int(
        sizes.get("num_experts")
        or sizes.get("num_local_experts")
        or sizes.get("n_routed_experts")
        or sizes.get("moe_num_experts")
        or 0
    )


def shared_expert_size(sizes: Mapping[str, Any]) -> int:
    """Return the total intermediate size of the shared experts; 0 if there are none."""
    if shared := sizes.get("shared_expert_intermediate_size"):
        return int(shared)
    shared = sizes.get("n_shared_experts") or sizes.get("moe_num_shared_experts") or 0
    return int(shared) * int(sizes.get("moe_intermediate_size") or 0)


def has_dense_mlps(sizes: Mapping[str, Any]) -> bool:
    """Return True if any layer has a dense MLP, according to the model's HF config."""
    if (kinds := sizes.get("mlp_layer_types")) is not None:
        return "dense" in kinds
    # all families with these fields have a dense first layer by default
    first = sizes.get(
        "first_k_dense_replace",
        sizes.get(
            "moe_layer_start_index",
            int("n_routed_experts" in sizes or "moe_num_experts" in sizes),
        ),
    )
    return not num_experts(sizes) or bool(first)


def lora_targets(sizes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that Megatron uses for the linear layers that support adapters."""
    if sizes.get("kv_lora_rank"):
        query: tuple[str, ...] = ("linear_q_proj",)
        if sizes.get("q_lora_rank"):
            query = ("linear_q_down_proj", "linear_q_up_proj")
        attention = (*query, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    else:
        attention = ("linear_qkv", "linear_proj")
    linears = ("linear_fc1", "linear_fc2")
    has_mlp = has_dense_mlps(sizes) or shared_expert_size(sizes)
    # gpt-oss stores a layer's experts as single tensors with biases, not as linears
    has_routed = num_experts(sizes) and sizes.get("model_type") != "gpt_oss"
    return (
        *attention,
        *(linears if has_mlp else ()),
        *(f"experts.{linear}" for linear in linears if has_routed),
    )


def engine_ranks(config: RunConfig) -> int:
    """Return the number of processes per engine that hold weights."""
    return config.rollout.tensor * config.rollout.pipeline


def engines_may_span_nodes(config: RunConfig) -> bool:
    """Return True if an engine may have ranks on several nodes: only in a cluster started by this
    run or on a trusted network."""
    return config.cluster.address is None or config.cluster.trusted_network


def logprob_diff_bound(config: RunConfig) -> float | None:
    """Return the bound on the mean difference between the engines' and the trainer's log-probs;
    None means unlimited."""
    rollout = config.rollout
    if rollout.logprob_diff_bound is None or config.model.dtype == "float32":
        return rollout.logprob_diff_bound
    return max(rollout.logprob_diff_bound, rollout.logprob_diff_bound_bfloat16)


def is_staged(config: RunConfig, kind: str) -> bool:
    """Return True if engines on this kind of device (cpu, cuda) stage the weights of a sync until
    all of them have arrived."""
    return (config.rollout.sync.commit or ("in_place" if kind == "cuda" else "staged")) == "staged"


def samples_per_step(config: RunConfig) -> int:
    """Return the number of responses generated per step: prompts x samples per prompt."""
    return config.data.train_batch_size * config.rollout.n


def samples_per_mini_batch(config: RunConfig) -> int:
    """Return the number of responses per optimizer update, summed over all data-parallel ranks."""
    return config.actor.ppo_mini_batch_size * config.rollout.n


def updates_per_step(config: RunConfig) -> int:
    """Return the number of optimizer updates per step."""
    return (
        config.data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs
    )


def scores_before_update(config: RunConfig) -> bool:
    """Return True if a separate pass computes the policy's log-probs and entropies for all rows
    before the first update of a step.

    Without it, the first update reports the values for its own rows, which it computes anyway with
    the same weights. The separate pass is needed if the reward, the estimator or the loss reads the
    values, or if it also has to record or compare experts.
    """
    actor = config.actor
    algorithm = config.algorithm
    reads = {
        *ESTIMATORS.get(algorithm.adv_estimator).reads,
        *POLICY_LOSSES.get(actor.policy_loss).reads,
    }
    if (
        algorithm.kl_coef
        or actor.router_replay != "none"
        or "entropys" in reads
        or actor.entropy_target is not None
    ):
        return True
    if algorithm.top_entropy_share < 1:
        return True
    return "old_log_probs" in ESTIMATORS.get(algorithm.adv_estimator).reads


def scores_later_rows(config: RunConfig) -> bool:
    """Return True if a pass before the first update of a step computes log-probs and entropies only
    for the rows of later mini-batches.

    Those are updated with changed weights, whereas the first update reports the values for its own
    rows.
    """
    several = config.actor.ppo_mini_batch_size != config.data.train_batch_size
    return several and config.actor.old_log_probs == "trainer" and not scores_before_update(config)


def share_scored_before_update(config: RunConfig) -> float:
    """Return the fraction of a step's rows that the policy scores in a separate pass before the
    first update."""
    if scores_before_update(config):
        return 1.0
    return (
        1 - config.actor.ppo_mini_batch_size / config.data.train_batch_size
        if scores_later_rows(config)
        else 0.0
    )


def old_log_probs_column(config: RunConfig) -> str | None:
    """Return the column that updates use as old log-probs, or None if each update uses the
    log-probs of its own forward pass, detached. The first of several updates also does so if no
    earlier pass computes old_log_probs for its rows.
    """
    if config.actor.old_log_probs == "engine":
        return "rollout_log_probs"
    return (
        "old_log_probs" if scores_before_update(config) or updates_per_step(config) != 1 else None
    )


def total_steps(config: RunConfig, rows: int | None) -> int | None:
    """Return the number of steps of a run: `trainer.total_steps`, or the number of full batches in
    `trainer.total_epochs` epochs of `rows` rows, at least one. None if it depends on `rows`, which
    is None.
    """
    trainer = config.trainer
    if trainer.total_epochs is None:
        return trainer.total_steps or 1
    return (
        None
        if rows is None
        else max(trainer.total_epochs * rows // config.data.train_batch_size, 1)
    )


def max_sequence_length(config: RunConfig) -> int:
    """Return the maximum number of tokens in a prompt plus its response."""
    return config.data.max_prompt_length + config.data.max_response_length


def engine_margin(config: RunConfig) -> int:
    """Return the number of tokens at the end of an engine's context that prompts must leave free.
    In a conversation, the prompt of an answer is everything before it.
    """
    return _PROMPT_MARGIN if config.rollout.agent.loop != "single_turn" else 0


def needs_reference(config: RunConfig) -> bool:
    """Return True if a KL term or the estimator needs log-probabilities of the reference policy."""
    return is_in_use(config, "reference")


def needs_sum_pi_squared(config: RunConfig) -> bool:
    """Return True if the estimator needs the sum of squared probabilities at each token, which
    requires a forward pass of the policy."""
    return "sum_pi_squared" in ESTIMATORS.get(config.algorithm.adv_estimator).reads


def short_round_prompts(config: RunConfig) -> int:
    """Return the number of prompts that a step with tail batching submits. The step trains on
    `data.train_batch_size` of them.
    """
    size = config.data.train_batch_size
    return size + max(1, round(size * config.trainer.tail_batching))


def needs_engine_routes(config: RunConfig) -> bool:
    """Return True if engines must return the experts that each token was routed to."""
    return config.actor.router_replay in ("compare", "r3")


def needs_support(config: RunConfig) -> bool:
    """Return True if engines must return each token's sampling support, over which the trainer
    normalizes log-probs. False for top_k=1, for which log-probs are computed over the whole
    vocabulary.
    """
    sampling = config.rollout.sampling
    cut = sampling.top_p < 1 or sampling.top_k != -1 or sampling.min_p > 0
    return config.data.answers == "sampled" and cut and sampling.top_k != 1


def replays_routes(config: RunConfig) -> bool:
    """Return True if updates replay recorded expert routes."""
    return config.actor.router_replay in ("r2", "r3")


def has_own_reference(config: RunConfig) -> bool:
    """Return True if a reference is needed and runs in separate processes."""
    return needs_reference(config) and not is_colocated(config, "reference")


def critics(config: RunConfig) -> tuple[str, ...]:
    """Return the critics of a run, in start order."""
    return tuple(name for name in CRITICS.values() if is_in_use(config, name))


def flow_name(config: RunConfig) -> str:
    """Return the name of the run's flow: `algorithm.flow`, or the flow implied by the other
    settings."""
    if config.algorithm.flow is not None:
        return config.algorithm.flow
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    if config.trainer.rollout_only:
        return "rollouts"
    if estimator.needs_critic:
        return "ppo"
    if "greedy_scores" in estimator.reads:
        return "remax"
    if has_teacher(config):
        alone = not (config.actor.distillation.task_rewards or has_reward_model(config))
        return "distill" if alone else "grpo"
    return "dpo" if estimator.preferences else "grpo"


def trains(config: RunConfig, role: str) -> bool:
    """Return True if a run of `hybridflow train` updates the weights of this role."""
    return ROLES[role].trains or (role == "reward_model" and config.reward_model.trains)


def has_reward_model(config: RunConfig) -> bool:
    """Return True if the run uses a reward model."""
    return ROLES["reward_model"].is_used(config)


def has_teacher(config: RunConfig) -> bool:
    """Return True if the run uses a teacher."""
    return is_in_use(config, "teacher")


def is_colocated(config: RunConfig, role: str) -> bool:
    """Return True if a role (`role_table.ROLES`) runs in the actor's processes."""
    return role == "actor" or bool(getattr(config, role).placement == "colocated")


def models_in_use(config: RunConfig, job: str = "train") -> tuple[str, ...]:
    """Return the models that `hybridflow train`, `sft` or `train-reward` uses, in start order.
    Includes a reference that is stored as a second set of weights on the policy's ranks.
    """
    if job == "train-reward":
        needs_policy = bool(config.sft.steps) or is_colocated(config, "reward_model")
        return ("actor", "reward_model") if needs_policy else ("reward_model",)
    if job == "sft":
        return ("actor",)
    return tuple(name for name in ROLES if is_in_use(config, name))


def is_in_use(config: RunConfig, role: str) -> bool:
    """Return True if a training run uses this role. A run that only generates uses the roles that
    its flow calls."""
    if config.trainer.rollout_only and role not in ("actor", *FLOWS.get("rollouts").roles):
        return False
    return ROLES[role].is_used(config)


def roles_in_use(config: RunConfig, job: str = "train") -> tuple[str, ...]:
    """Return the roles that have separate workers: `models_in_use` without a reference on the
    policy's ranks.
    """
    swapped = "reference" if is_colocated(config, "reference") else None
    return tuple(name for name in models_in_use(config, job) if name != swapped)


def pool_of(config: RunConfig, section: str) -> str:
    """Return the name of the section that provides the devices for `rollout` or for a role."""
    if section != "rollout" and is_colocated(config, section):
        return "actor"
    return getattr(config, section).pool or section


def devices_of(config: RunConfig, role: str) -> str:
    """Return the name of the device pool of a role or of an additional policy. An additional policy
    uses separate devices unless it shares the first policy's weights.
    """
    if role in config.roles:
        return role if config.roles[role].base is None else "actor"
    return pool_of(config, role)


def shares_devices(config: RunConfig) -> bool:
    """Return True if engines share devices with the trainer's ranks."""
    return pool_of(config, "rollout") == "actor"


def generates(config: RunConfig) -> bool:
    """Return True if a run uses engines; otherwise it trains on dumps."""
    return config.trainer.rollouts_from is None


def alternates(config: RunConfig) -> bool:
    """Return True if engines share devices with the trainer and release them whenever the trainer
    needs them, including right after start-up.
    """
    return (
        generates(config)
        and shares_devices(config)
        and config.rollout.sleep_while_training
        and not config.cluster.in_process
    )


def role_layout(config: RunConfig, role: str) -> ParallelConfig:
    """Return the parallel layout of a role: its own, or the actor's if the role runs in the actor's
    processes."""
    layout: ParallelConfig = getattr(config, layout_section(config, role)).parallel
    return layout


def layout_section(config: RunConfig, role: str) -> str:
    """Return the name of the configuration section whose `parallel` applies to a role."""
    return "actor" if is_colocated(config, role) else role


def role_world_size(config: RunConfig, role: str) -> int:
    """Return the number of processes of a role."""
    return world_size(config) if is_colocated(config, role) else int(getattr(config, role).procs)


def role_data_parallel_size(config: RunConfig, role: str) -> int:
    """Return the number of replicas of a role's model among which a batch is divided."""
    return role_world_size(config, role) // model_parallel_size(role_layout(config, role))


def role_mini_batch_size(config: RunConfig, role: str) -> int:
    """Return the number of prompts per optimizer update of the actor or of a critic."""
    return getattr(config, role).ppo_mini_batch_size or config.actor.ppo_mini_batch_size


def role_samples_per_mini_batch(config: RunConfig, role: str) -> int:
    """Return the number of responses per optimizer update of the actor or of a critic, over all
    data-parallel ranks of the role.
    """
    return role_mini_batch_size(config, role) * config.rollout.n


def role_updates_per_step(config: RunConfig, role: str) -> int:
    """Return the number of optimizer updates per step of a trained role."""
    if role == "reward_model":
        return 1
    updates = config.data.train_batch_size // role_mini_batch_size(config, role)
    return updates * int(getattr(config, role).ppo_epochs)


def policy_view(config: RunConfig, name: str) -> RunConfig:
    """Return the configuration for the additional policy `roles.NAME`: its sections and process
    count replace those of the first policy, and the only other model is its reference.
    """
    own = config.roles[name]
    batch = own.train_batch_size or config.data.train_batch_size
    cluster = config.cluster
    if own.base is None:
        cluster = replace(cluster, nodes=1, procs_per_node=own.procs or world_size(config))
    return replace(
        config,
        data=replace(config.data, train_batch_size=batch),
        model=own.model,
        actor=own.actor,
        rollout=own.rollout,
        roles={},
        **{name: type(getattr(config, name))() for name in ROLES if name != "actor"},
        sft=SftConfig(),
        algorithm=replace(config.algorithm, flow=None, flow_options={}),
        cluster=cluster,
    )


def run_dir(config: RunConfig) -> Path:
    """Return the run folder, which contains everything the run writes."""
    return Path(config.output_dir) / config.name


def differing_size(
    wanted: Mapping[str, Any], sizes: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Return (name, wanted value, other value) for the first model size, or the model family, that
    differs between two configs; None if all match. Length limits are ignored, because they only
    bound positions, and so is whether the vision tower is part of the model (`with_tower`).
    """
    kind = str(sizes.get("model_type"))
    if kind in TEXT_TYPES:
        sizes = {**sizes, "model_type": TEXT_TYPES[kind]}
    for name, value in flattened(wanted).items():
        other = sizes.get(name, value)
        is_size = (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name != "max_position_embeddings"
        )
        if (is_size or name == "model_type") and other is not None and other != value:
            return name, value, other
    return None


def run_hf_config(config: RunConfig, model: ModelConfig | None = None) -> Mapping[str, Any]:
    """Return the Hugging Face configuration of the run's model, or of a role's `model`. A run with
    images uses the vision tower of a model, other runs only its text model if that can be trained
    alone (`model_config.TEXT_TYPES`).

    Raises:
        ConfigError: as for `hf_config`.
    """
    found = hf_config(model or config.model)
    return found if config.data.image_key is None else with_tower(found)


def hf_config(model: ModelConfig) -> Mapping[str, Any]:
    """Return the Hugging Face configuration: `path`/config.json if `path` is set, else `hf_config`.
    If `path` is a hub id that is not cached, as may happen in a plan, the recipe's `hf_config` is
    used.

    Raises:
        ConfigError: config.json is missing or not a JSON object, or a field has an impossible value
            (`read_model_config`).
    """
    if model.path is None or (model.hf_config and hub.is_hub_id(model.path)):
        found = flattened(model.hf_config)
        if wrong := wrong_fields(found):
            raise ConfigError("\n".join(f"model.hf_config.{line}" for line in wrong))
        return found
    file = Path(model.path) / "config.json"
    try:
        return read_model_config(file)
    except OSError as error:
        raise ConfigError(
            f"model.path={model.path}: {file} could not be read ({error.strerror}); set it to a "
            "Hugging Face folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.path={model.path}: {file} is {error}") from error
