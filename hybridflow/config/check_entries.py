"""Checks that the advantage estimator, the policy loss and the trackers exist, that their options
are valid, and that they are compatible with the other settings."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hybridflow.config import derived
from hybridflow.config.entries import (
    ESTIMATORS,
    FLOWS,
    POLICY_LOSSES,
    STATISTICS,
    TRACKERS,
    estimator_options,
    flow_options,
    policy_loss_options,
)
from hybridflow.config.keys import all_keys, differing, out_of_range, value_at
from hybridflow.config.role_table import CRITICS, ROLES
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each problem with the names and options. Imports the configured
    entries.
    """
    builds: list[tuple[str, Callable[[], object]]] = [
        ("algorithm.adv_estimator_options", lambda: estimator_options(config.algorithm)),
        ("algorithm.flow_options", lambda: flow_options(config.algorithm)),
        ("actor.policy_loss_options", lambda: policy_loss_options(config.actor)),
        *(("", partial(TRACKERS.get, name)) for name in config.trainer.loggers),
    ]
    for key, build in builds:
        try:
            options = build()
        except ConfigError as error:
            yield str(error)
        else:
            for line in out_of_range(options) if key else ():
                yield f"{key}.{line}"


def library_problems(config: RunConfig) -> Iterator[str]:
    """Yield one problem for each tracker whose library is not installed on this machine."""
    for name in config.trainer.loggers:
        try:
            library = TRACKERS.get(name).library
        except ConfigError:  # `problems` reports it
            continue
        # a folder wandb/ in the working directory is also found, as a package without a file
        found = importlib.util.find_spec(library) if library else None
        if library and (found is None or found.origin is None):
            yield (
                f"trainer.loggers={name}: the package {library} is not installed; run pip install "
                f"'hybridflow[{library}]', or remove {name} from trainer.loggers"
            )


def flow_problems(config: RunConfig) -> Iterator[str]:
    """Check that the flow calls exactly the roles that the other settings enable, and that its
    training mode matches `trainer.rollout_only`.
    """
    name = derived.flow_name(config)
    flow = FLOWS.get(name)
    called = flow.roles
    given = f"algorithm.flow={name}"
    if flow.policy_losses and config.actor.policy_loss not in flow.policy_losses:
        yield (
            f"actor.policy_loss={config.actor.policy_loss} is not supported with {given}; set "
            f"actor.policy_loss={flow.policy_losses[0]}"
        )
    roles = [role for role in derived.roles_in_use(config) if role != "actor"]
    if derived.needs_reference(config) and "reference" not in roles:
        roles.append("reference")
    for role in (*roles, *config.roles):
        if role not in called:
            yield (
                f"{given} does not call run.{role}, but this run starts a "
                f"{role.replace('_', ' ')}, which would be idle. Call it in the flow and add it to "
                "the flow's roles, choose another flow (null selects one), or remove the role"
            )
    for role in flow.roles:
        if role not in ROLES and role not in ("policy", *config.roles):
            yield (
                f"{given} calls run.{role}, but this run has no such policy: define it under roles "
                f"(roles={{{role}: {{}}}} inherits the settings of the first policy)"
            )
    critics = derived.critics(config)
    if critics and "critic" not in critics:
        yield (
            f"{given} calls run.{critics[0]}, but "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} does not use a critic; set "
            f"adv_estimator=gae, or remove run.{critics[0]} from the flow"
        )
    if config.reward_model.trains and config.algorithm.flow is None:
        yield (
            f"reward_model.trains=true has no effect with {given}, the flow that the other "
            "settings select: set algorithm.flow=learned_reward, or trains=false"
        )
    if config.trainer.rollout_only and name != "rollouts":
        yield (
            f"trainer.rollout_only=true is not supported with {given}, because that flow trains; "
            "remove algorithm.flow, or set rollout_only=false"
        )
    if name == "rollouts" and not config.trainer.rollout_only:
        yield f"{given} does not train; set trainer.rollout_only=true, or choose another flow"


def loss_problems(config: RunConfig) -> Iterator[str]:
    """Check that the policy loss supports the configured aggregation and rollout correction, and
    that a configured critic is used."""
    actor = config.actor
    correction = config.actor.rollout_correction
    loss = POLICY_LOSSES.get(actor.policy_loss)
    if loss.aggregations and actor.loss_agg_mode not in loss.aggregations:
        yield (
            f"actor.loss_agg_mode={actor.loss_agg_mode} is not supported with "
            f"actor.policy_loss={actor.policy_loss}, because that loss averages over sequences; "
            f"set actor.loss_agg_mode={loss.aggregations[0]}"
        )
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    if estimator.aggregations and actor.loss_agg_mode not in estimator.aggregations:
        yield (
            f"actor.loss_agg_mode={actor.loss_agg_mode} is not supported with "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator}, because it defines a loss "
            f"per answer; set actor.loss_agg_mode={estimator.aggregations[0]}"
        )
    if (
        correction.weight != "none"
        and actor.old_log_probs == "engine"
        and "old_log_probs" in loss.reads
    ):
        yield (
            f"actor.rollout_correction.weight={correction.weight} with actor.old_log_probs=engine "
            "would be applied twice, because it equals the ratio in "
            f"actor.policy_loss={actor.policy_loss}; set weight=none, old_log_probs=trainer, or "
            "policy_loss=reinforce"
        )
    if actor.kl_loss_unbiased and actor.kl_loss_type not in ("k1", "k3"):
        yield (
            "actor.kl_loss_unbiased=true is not supported with "
            f"actor.kl_loss_type={actor.kl_loss_type}: only k1 and k3 have the gradient of the "
            "divergence when weighted by the ratio; set kl_loss_type=k3, or kl_loss_unbiased=false"
        )
    if correction.lower is not None and not correction.lower <= correction.upper:
        yield (
            f"actor.rollout_correction.lower={correction.lower} is more than "
            f"upper={correction.upper}: every weight would be 0"
        )
    if correction.lower is not None and correction.weight == "none":
        yield (
            f"actor.rollout_correction.lower={correction.lower} has no effect with weight=none; "
            "set weight=token or sequence, or lower=null"
        )
    for name, bound in correction.reject.items():
        if problem := _bound_problem(str(name), bound):
            yield f"actor.rollout_correction.reject.{name}={bound}: {problem}"
    yield from _unused_critics(config)


def _unused_critics(config: RunConfig) -> Iterator[str]:
    """Check that the run uses each critic that is configured: `critic.path` requires an estimator
    with a critic, and any other critic must be called by the flow.
    """
    estimator = config.algorithm.adv_estimator
    if config.critic.path is not None and not ESTIMATORS.get(estimator).needs_critic:
        yield (
            f"critic.path={config.critic.path} has no effect with "
            f"algorithm.adv_estimator={estimator}, because that estimator uses no critic; remove "
            "critic.path, or set adv_estimator=gae"
        )
    for name in CRITICS.values():
        if name in ("critic", *derived.critics(config)):
            continue
        plain = replace(config, **{name: type(getattr(config, name))()})
        keys = [key for key, _ in all_keys(type(config)) if key.startswith(f"{name}.")]
        for key, value, _ in differing(config, {key: value_at(plain, key) for key in keys}):
            yield (
                f"{key}={value} has no effect: algorithm.flow={derived.flow_name(config)} does not "
                f"call run.{name}; remove the section, or set {ROLES[name].comes_with}"
            )
            break


def preference_problems(config: RunConfig) -> Iterator[str]:
    """Check the settings used with a preference loss. Such a loss weights each answer based on the
    log-probs at the start of the step, so with several updates per step, later ones would use stale
    values. It also includes a KL term, so another one would penalize the divergence twice.
    """
    name = config.algorithm.adv_estimator
    if not ESTIMATORS.get(name).preferences:
        return
    wanted: dict[str, Any] = {
        "actor.ppo_mini_batch_size": config.data.train_batch_size,
        "actor.ppo_epochs": 1,
        "actor.kl_loss_coef": 0.0,
        "algorithm.kl_coef": 0.0,
    }
    for key, given, one in differing(config, wanted):
        why = (
            "is exact only with one update per step"
            if key.startswith("actor.ppo")
            else "has its own KL term"
        )
        yield (
            f"{key}={given} is not supported with algorithm.adv_estimator={name}, because it "
            f"{why}; set {key}={one}"
        )


def recorded_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that are incompatible with recorded pairs."""
    if config.data.answers != "pairs":
        return
    pairs = "data.answers=pairs"
    correction = config.actor.rollout_correction
    algorithm = config.algorithm
    able = []
    for name in ESTIMATORS.names():
        if ESTIMATORS.get(name).preferences:
            able.append(name)
    if algorithm.adv_estimator not in able:
        yield (
            f"{pairs} is not supported with algorithm.adv_estimator={algorithm.adv_estimator}, "
            "because that estimator learns from answers sampled by the policy; set adv_estimator "
            f"to {', '.join(able)}, or data.answers=sampled"
        )
    if config.rollout.n != 2:
        yield (
            f"rollout.n={config.rollout.n} must be 2 with {pairs}: a prompt has two answers, "
            "chosen and rejected"
        )
    if correction.weight != "none" or correction.reject:
        yield (
            f"actor.rollout_correction is not supported with {pairs}, because no engine sampled "
            "those answers; remove it"
        )
    sampled: dict[str, Any] = {
        "actor.old_log_probs": "trainer",
        "actor.router_replay": "none",
        "trainer.max_staleness": 0,
        "algorithm.dynamic_sampling": 0,
        "algorithm.overlong_filter": False,
        **dict.fromkeys(
            (
                "reward_model.path",
                "data.dataset_class.path",
                "data.weight_key",
                "data.difficulty_key",
            )
        ),
    }
    for key, given, wanted in differing(config, sampled):
        yield (
            f"{key}={given} applies to sampled answers, but {pairs} uses recorded ones; set it to "
            f"{wanted}"
        )


def _bound_problem(name: str, bound: Any) -> str:
    """Explain why a rejection statistic's name or bound is invalid. Empty if both are valid."""
    if name not in STATISTICS:
        near = difflib.get_close_matches(name, STATISTICS, n=1, cutoff=0.0)[0]
        return f"unknown statistic; did you mean {near}? (choose one of {', '.join(STATISTICS)})"
    numbers = bound if isinstance(bound, list | tuple) else [bound]
    if not all(type(number) in (int, float) and number > 0 for number in numbers):
        return "bounds must be numbers above 0"
    if name.endswith("k1"):
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            return (
                "expected two numbers for k1, the [lowest, highest] engine/trainer ratio, for "
                "example [0.99, 1.01]"
            )
    elif isinstance(bound, list | tuple):
        return "expected one number, the upper bound"
    return ""


def sample_problems(config: RunConfig) -> Iterator[str]:
    """Check that each step generates the samples that the estimator needs, such as at least two per
    prompt or a greedy answer for ReMax, and that the settings that filter or penalize samples are
    consistent.
    """
    algorithm = config.algorithm
    rollout = config.rollout
    reward = config.reward
    name = algorithm.adv_estimator
    entry = ESTIMATORS.get(algorithm.adv_estimator)
    if algorithm.dynamic_sampling == 1:
        yield (
            "algorithm.dynamic_sampling=1 has no effect: with one batch of prompts per step no "
            "group can be replaced; set it to 2 or more, or to 0"
        )
    if algorithm.dynamic_sampling and not entry.compares_samples:
        yield (
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling} is not supported with "
            f"algorithm.adv_estimator={name}, because that estimator also learns from groups with "
            "equal scores; set dynamic_sampling=0 or adv_estimator=grpo"
        )
    if reward.overlong_tokens > config.data.max_response_length:
        yield (
            f"reward.overlong_tokens={reward.overlong_tokens} is more than "
            f"data.max_response_length={config.data.max_response_length}: every answer would be "
            "penalized; reduce it"
        )
    greedy = "greedy_scores" in entry.reads
    temperature = rollout.val_sampling.temperature
    if greedy and temperature:
        yield (
            f"rollout.val_sampling.temperature={temperature} must be 0 with "
            f"algorithm.adv_estimator={name}, because its baseline is a greedy answer sampled with "
            "the validation settings"
        )
    if greedy and config.reward_model.path is not None:
        yield (
            f"reward_model.path={config.reward_model.path} is not supported with "
            f"algorithm.adv_estimator={name}, because its baseline comes from reward functions "
            "only; remove the reward model, or choose another estimator"
        )
    if "sum_pi_squared" in entry.reads and config.actor.router_replay != "none":
        yield (
            f"actor.router_replay={config.actor.router_replay} is not supported with "
            f"algorithm.adv_estimator={name}, because its pass over the full vocabulary would "
            "route tokens to other experts; set router_replay=none, or choose another estimator"
        )
    if config.rollout.n == 1 and ESTIMATORS.get(name).compares_samples:
        others = []
        for other in ESTIMATORS.names():
            if not ESTIMATORS.get(other).compares_samples:
                others.append(other)
        yield (
            f"rollout.n=1 is not supported with algorithm.adv_estimator={name}, because it "
            "compares the samples of a prompt, and with one sample the advantage would be the "
            f"score itself; set rollout.n to 2 or more, or choose {' or '.join(others)}"
        )
