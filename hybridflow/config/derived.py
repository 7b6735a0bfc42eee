"""Numbers that follow from a configuration. Nothing here is stored back: the configuration stays as
the user wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.config import hub
from hybridflow.config.entries import ESTIMATORS, POLICY_LOSSES
from hybridflow.config.outside_json import read_outside_json
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import (
    CriticConfig,
    ModelConfig,
    ParallelConfig,
    ReferenceConfig,
    RewardModelConfig,
    RunConfig,
    TeacherConfig,
)
from hybridflow.errors import ConfigError

Role = CriticConfig | ReferenceConfig | RewardModelConfig | TeacherConfig

_PROMPT_MARGIN = 6  # the largest among the engines


def world_size(config: RunConfig) -> int:
    """Megatron processes."""
    return config.cluster.nodes * config.cluster.procs_per_node


def model_parallel_size(parallel: ParallelConfig) -> int:
    """Processes that hold one copy of the non-expert weights."""
    return parallel.tensor * parallel.pipeline * parallel.context


def virtual_pipeline_size(parallel: ParallelConfig) -> int:
    """Model chunks a pipeline rank holds; 1 without interleaving."""
    return parallel.virtual_pipeline or 1


def tokens_multiple(parallel: ParallelConfig) -> int:
    """Every sequence is padded to a multiple of it: context parallelism cuts a sequence into 2 x
    context chunks (zigzag)."""
    return 2 * parallel.context if parallel.context > 1 else 1


def padded_length(tokens: int, parallel: ParallelConfig) -> int:
    """Tokens that a sequence takes in a micro-batch, its padding included."""
    return -(-tokens // tokens_multiple(parallel)) * tokens_multiple(parallel)


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """Tensor parallelism inside an expert, its default filled in."""
    if parallel.expert_tensor is not None:
        return parallel.expert_tensor
    return 1 if parallel.expert > 1 else parallel.tensor


def expert_model_parallel_size(parallel: ParallelConfig) -> int:
    """Processes that hold one copy of the expert weights."""
    return parallel.expert * expert_tensor_size(parallel) * parallel.pipeline


def data_parallel_size(config: RunConfig) -> int:
    """Copies of the model that share a batch."""
    return world_size(config) // model_parallel_size(config.actor.parallel)


def num_experts(sizes: Mapping[str, Any]) -> int:
    """Routed experts of a model by its HF config, whatever its family calls them; 0 for a dense
    one."""
    return int(
        sizes.get("num_experts")
        or sizes.get("num_local_experts")
        or sizes.get("n_routed_experts")
        or 0
    )


def shared_expert_size(sizes: Mapping[str, Any]) -> int:
    """Intermediate size of the experts that every token visits, all together; 0 without them."""
    if shared := sizes.get("shared_expert_intermediate_size"):
        return int(shared)
    return int(sizes.get("n_shared_experts") or 0) * int(sizes.get("moe_intermediate_size") or 0)


def has_dense_mlps(sizes: Mapping[str, Any]) -> bool:
    """Return whether some layer of a model has a dense MLP, by its HF config."""
    if (kinds := sizes.get("mlp_layer_types")) is not None:
        return "dense" in kinds
    # of the families with this field, all have a first dense layer by default
    first = sizes.get("first_k_dense_replace", int("n_routed_experts" in sizes))
    return not num_experts(sizes) or bool(first)


def lora_targets(sizes: Mapping[str, Any]) -> tuple[str, ...]:
    """The linears of a model that adapters can stand beside, by Megatron's names; routed experts
    are none of them."""
    if sizes.get("kv_lora_rank"):
        query = (
            ("linear_q_down_proj", "linear_q_up_proj")
            if sizes.get("q_lora_rank")
            else ("linear_q_proj",)
        )
        attention = (*query, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    else:
        attention = ("linear_qkv", "linear_proj")
    has_mlp = has_dense_mlps(sizes) or shared_expert_size(sizes)
    return (*attention, *(("linear_fc1", "linear_fc2") if has_mlp else ()))


def engine_ranks(config: RunConfig) -> int:
    """Processes of one engine that hold weights."""
    return config.rollout.tensor * config.rollout.pipeline


def engines_may_span_nodes(config: RunConfig) -> bool:
    """Whether an engine may have ranks on several nodes: in a cluster that this run starts, or on a
    trusted network."""
    return config.cluster.address is None or config.cluster.trusted_network


def logprob_diff_bound(config: RunConfig) -> float | None:
    """The largest mean difference of engines' and trainer's log-probs that a run goes on with;
    None: any."""
    rollout = config.rollout
    if rollout.logprob_diff_bound is None or config.model.dtype == "float32":
        return rollout.logprob_diff_bound
    return max(rollout.logprob_diff_bound, rollout.logprob_diff_bound_bfloat16)


def is_staged(config: RunConfig, kind: str) -> bool:
    """Whether engines on devices of this kind (cpu, cuda) keep a sync's weights apart until all
    have arrived."""
    return (config.rollout.sync.commit or ("in_place" if kind == "cuda" else "staged")) == "staged"


def samples_per_step(config: RunConfig) -> int:
    """Responses generated in one step: prompts x samples a prompt."""
    return config.data.train_batch_size * config.rollout.n


def samples_per_mini_batch(config: RunConfig) -> int:
    """Responses that one optimizer update sees, over all data-parallel ranks."""
    return config.actor.ppo_mini_batch_size * config.rollout.n


def updates_per_step(config: RunConfig) -> int:
    """Optimizer updates in one step."""
    return (
        config.data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs
    )


def scores_before_update(config: RunConfig) -> bool:
    """Whether a pass computes the policy's log-probs and entropies of all rows before a step's
    first update.

    Without it the first update reports those of its rows: it computes them anyway, with the weights
    that the pass would have. They are needed earlier where the reward, the estimator or the loss
    reads them, and where the pass records or compares experts.
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
    """Whether a pass before a step's first update computes log-probs and entropies of the rows of
    later mini-batches.

    Their updates find weights that have moved; the first update reports log-probs and entropies of
    its own rows.
    """
    several = config.actor.ppo_mini_batch_size != config.data.train_batch_size
    return several and config.actor.old_log_probs == "trainer" and not scores_before_update(config)


def share_scored_before_update(config: RunConfig) -> float:
    """The share of a step's rows that a pass of the policy scores before the first update."""
    if scores_before_update(config):
        return 1.0
    return (
        1 - config.actor.ppo_mini_batch_size / config.data.train_batch_size
        if scores_later_rows(config)
        else 0.0
    )


def old_log_probs_column(config: RunConfig) -> str | None:
    """The column that updates compare their log-probs with; None: the update's own values, without
    their gradient.

    Where no pass has computed old_log_probs of its rows, the first of several updates compares with
    its own values too.
    """
    if config.actor.old_log_probs == "engine":
        return "rollout_log_probs"
    return (
        "old_log_probs" if scores_before_update(config) or updates_per_step(config) != 1 else None
    )


def total_steps(config: RunConfig, rows: int | None) -> int | None:
    """Steps of a run on so many rows: `trainer.total_steps`, or the whole batches of
    `trainer.total_epochs`, one at least. None where they follow from rows that are not known."""
    trainer = config.trainer
    if trainer.total_epochs is None:
        return trainer.total_steps or 1
    return (
        None
        if rows is None
        else max(trainer.total_epochs * rows // config.data.train_batch_size, 1)
    )


def max_sequence_length(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_length + config.data.max_response_length


def engine_margin(config: RunConfig) -> int:
    """Tokens at the end of an engine's context in which no prompt may end. A conversation becomes
    the prompt of its next answer."""
    return _PROMPT_MARGIN if config.rollout.agent.loop != "single_turn" else 0


def needs_reference(config: RunConfig) -> bool:
    """Whether a KL term or the estimator asks for log-probabilities of the reference policy."""
    return ROLES["reference"].is_used(config)


def needs_sum_pi_squared(config: RunConfig) -> bool:
    """Whether the estimator asks for the sum of squared probabilities at each token, a forward pass
    of the policy."""
    return "sum_pi_squared" in ESTIMATORS.get(config.algorithm.adv_estimator).reads


def short_round_prompts(config: RunConfig) -> int:
    """Prompts that a step with tail batching hands out, of which it trains
    `data.train_batch_size`."""
    size = config.data.train_batch_size
    return size + max(1, round(size * config.trainer.tail_batching))


def needs_engine_routes(config: RunConfig) -> bool:
    """Whether engines must return the experts of every token."""
    return config.actor.router_replay in ("compare", "r3")


def needs_support(config: RunConfig) -> bool:
    """Whether engines must return what each token was sampled among, for the trainer's log-probs.
    The most likely token alone (top_k=1) would have none: its log-prob stays that of the whole
    vocabulary."""
    sampling = config.rollout.sampling
    cut = sampling.top_p < 1 or sampling.top_k != -1 or sampling.min_p > 0
    return config.data.answers == "sampled" and cut and sampling.top_k != 1


def replays_routes(config: RunConfig) -> bool:
    """Whether updates go along recorded experts."""
    return config.actor.router_replay in ("r2", "r3")


def has_own_reference(config: RunConfig) -> bool:
    """Whether a reference is asked for and lives in processes of its own."""
    return needs_reference(config) and not is_colocated(config, "reference")


def has_critic(config: RunConfig) -> bool:
    """Whether advantages are measured against the values of a critic."""
    return ROLES["critic"].is_used(config)


def flow_name(config: RunConfig) -> str:
    """The flow of the run: `algorithm.flow`, else the one that the other settings ask for."""
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


def has_reward_model(config: RunConfig) -> bool:
    """Whether a trained model scores responses."""
    return ROLES["reward_model"].is_used(config)


def has_teacher(config: RunConfig) -> bool:
    """Whether a teacher's most likely tokens are asked for."""
    return ROLES["teacher"].is_used(config)


def is_colocated(config: RunConfig, role: str) -> bool:
    """Whether a role (`role_table.ROLES`) lives in the actor's processes."""
    return role == "actor" or bool(getattr(config, role).placement == "colocated")


def models_in_use(config: RunConfig, job: str = "train") -> tuple[str, ...]:
    """The roles of `hybridflow train`, `sft` or `train-reward`, in the order in which they are
    started; with a reference that the policy's ranks hold as a second set of weights."""
    if job == "train-reward":
        needs_policy = bool(config.sft.steps) or is_colocated(config, "reward_model")
        return ("actor", "reward_model") if needs_policy else ("reward_model",)
    if job == "sft":
        return ("actor",)
    return tuple(name for name, role in ROLES.items() if role.is_used(config))


def roles_in_use(config: RunConfig, job: str = "train") -> tuple[str, ...]:
    """The roles that have workers: `models_in_use` without a reference that the policy's ranks
    hold."""
    swapped = "reference" if is_colocated(config, "reference") else None
    return tuple(name for name in models_in_use(config, job) if name != swapped)


def pool_of(config: RunConfig, section: str) -> str:
    """The section whose devices the processes of `rollout` or of a role use."""
    if section != "rollout" and is_colocated(config, section):
        return "actor"
    return getattr(config, section).pool or section


def shares_devices(config: RunConfig) -> bool:
    """Whether engines use the devices of the trainer's ranks, in turns with them."""
    return pool_of(config, "rollout") == "actor"


def generates(config: RunConfig) -> bool:
    """Whether a run has engines; without, it trains on dumps."""
    return config.trainer.rollouts_from is None


def alternates(config: RunConfig) -> bool:
    """Whether engines release the devices that they share with the trainer while it uses them, from
    their start on."""
    return (
        generates(config)
        and shares_devices(config)
        and config.rollout.sleep_while_training
        and not config.cluster.in_process
    )


def role_layout(config: RunConfig, role: str) -> ParallelConfig:
    """The layout of a role: its own, or the actor's where it lives in the actor's processes."""
    layout: ParallelConfig = getattr(config, layout_section(config, role)).parallel
    return layout


def layout_section(config: RunConfig, role: str) -> str:
    """The section of the configuration whose `parallel` cuts a role."""
    return "actor" if is_colocated(config, role) else role


def role_world_size(config: RunConfig, role: str) -> int:
    """Processes of a role."""
    return world_size(config) if is_colocated(config, role) else int(getattr(config, role).procs)


def role_data_parallel_size(config: RunConfig, role: str) -> int:
    """Copies of its model that share a batch."""
    return role_world_size(config, role) // model_parallel_size(role_layout(config, role))


def critic_mini_batch_size(config: RunConfig) -> int:
    """Prompts an optimizer update of the critic sees."""
    return config.critic.ppo_mini_batch_size or config.actor.ppo_mini_batch_size


def role_samples_per_mini_batch(config: RunConfig, role: str) -> int:
    """Responses an optimizer update of the actor or the critic sees, over all data-parallel ranks
    of the role."""
    prompts = (
        critic_mini_batch_size(config) if role == "critic" else config.actor.ppo_mini_batch_size
    )
    return prompts * config.rollout.n


def role_updates_per_step(config: RunConfig, role: str) -> int:
    """Optimizer updates of a role that trains in one step."""
    mini_batch = role_samples_per_mini_batch(config, role) // config.rollout.n
    return config.data.train_batch_size // mini_batch * int(getattr(config, role).ppo_epochs)


def run_dir(config: RunConfig) -> Path:
    """The folder that holds everything the run writes."""
    return Path(config.output_dir) / config.name


def differing_size(
    wanted: Mapping[str, Any], sizes: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """(name, wanted, other) of the first size, or the family, that both give and that differs; None
    where all agree. Lengths may differ: they say how far positions reach."""
    for name, value in wanted.items():
        other = sizes.get(name, value)
        is_size = (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name != "max_position_embeddings"
        )
        if (is_size or name == "model_type") and other is not None and other != value:
            return name, value, other
    return None


def hf_config(model: ModelConfig) -> Mapping[str, Any]:
    """The Hugging Face configuration: `hf_config` as given, else `path`/config.json. A plan takes
    the sizes of a recipe whose `path` is a hub id that is not in the cache.

    Raises:
        ConfigError: config.json is missing or not an object of JSON (`read_outside_json`).
    """
    if model.path is None or (model.hf_config and hub.is_hub_id(model.path)):
        return model.hf_config
    file = Path(model.path) / "config.json"
    try:
        return read_outside_json(file)
    except OSError as error:
        raise ConfigError(
            f"model.path={model.path}: {file} cannot be read ({error.strerror}); give a Hugging "
            "Face folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.path={model.path}: {file} is {error}") from error
