"""The loop's train group over worker groups: what runs where, and what crosses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import ROUTES, DataProto
from hybridflow.config import derived
from hybridflow.config.schema import OptimConfig, RunConfig
from hybridflow.data.balancing import SequenceCost
from hybridflow.data.packing import balanced_order
from hybridflow.device.residency import Part
from hybridflow.dispatch import DataflowStep, check_dataflow
from hybridflow.rollout.service import as_batch, generate_method
from hybridflow.single_controller import WorkerGroup
from hybridflow.trainer.advantages import advantages_step
from hybridflow.trainer.observations import memory_metrics, model_metrics, replay_metrics
from hybridflow.trainer.protocols import Update
from hybridflow.workers.losses import policy_loss_columns
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.teacher import TeacherWorker
from hybridflow.workers.value_roles import CriticWorker, RewardModelWorker


class PolicyGroup:
    """`TrainGroup` over Megatron ranks."""

    def __init__(self, group: WorkerGroup, config: RunConfig) -> None:
        self.group, self.config = group, config
        self._cost = SequenceCost.of_model(derived.hf_config(config.model))
        self._unobserved = False

    def set_optimizer(self, config: OptimConfig) -> None:
        """See TrainGroup."""
        self.group.run(PolicyWorker.set_optimizer, config)

    def sft_step(self, batch: DataProto) -> Update:
        """See TrainGroup."""
        return merge(self.group.run(PolicyWorker.sft_step, batch))

    def log_probs(self, batch: DataProto) -> DataProto:
        """See TrainGroup."""
        # the last step did not update the policy (critic warm-up, a lost rank): its counts are of another batch
        if self._unobserved:
            self.group.run(PolicyWorker.take_observations)
        self._unobserved = True
        return self._balanced(_log_prob_method(self.config), batch)

    def ref_log_probs(self, batch: DataProto) -> DataProto:
        """See TrainGroup."""
        return self._balanced(PolicyWorker.compute_ref_log_probs, batch)

    def update(self, batch: DataProto, seed: int) -> Sequence[Update]:
        """See TrainGroup."""
        rows = derived.samples_per_mini_batch(self.config) // derived.data_parallel_size(self.config)
        share = batch.select(update_step(self.config).reads).reorder(self._order(batch))
        reports = self.group.run(PolicyWorker.update_policy, share, rows, seed)
        observed = self._observed(batch)
        return [merge(rank_reports, observed) for rank_reports in zip(*reports, strict=True)]

    def sleep(self, parts: tuple[Part, ...]) -> None:
        """See TrainGroup."""
        self.group.run(PolicyWorker.sleep, parts)

    def wake(self, parts: tuple[Part, ...]) -> None:
        """See TrainGroup."""
        self.group.run(PolicyWorker.wake, parts)

    def freeze_reference(self) -> None:
        """See TrainGroup."""
        self.group.run(PolicyWorker.freeze_reference)

    def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """See TrainGroup."""
        self.group.run(PolicyWorker.save_checkpoint, folder.resolve(), phase, step, background)

    def is_saved(self) -> bool:
        """See TrainGroup."""
        return all(self.group.run(PolicyWorker.is_checkpoint_written))

    def load(self, folder: Path, optim: OptimConfig, with_reference: bool) -> None:
        """See TrainGroup."""
        self.group.run(PolicyWorker.load_checkpoint, folder.resolve(), optim, with_reference)

    def export(self, folder: Path) -> None:
        """See TrainGroup."""
        self.group.run(PolicyWorker.export_hf, folder.resolve())

    def _observed(self, batch: DataProto) -> dict[str, float]:
        """Peaks of memory and the replayed routes of the step that `batch` went through. Raises when replay was not
        live."""
        observations, self._unobserved = self.group.run(PolicyWorker.take_observations), False
        lengths, actor = (batch.lengths("prompt_ids"), batch.lengths("response_ids")), self.config.actor
        replayed = replay_metrics(observations, *lengths, actor.router_replay, actor.ppo_epochs)
        return memory_metrics(observations, "actor") | model_metrics(observations) | replayed

    def _order(self, batch: DataProto) -> np.ndarray:
        """The order [B] in which the consecutive rows of each data-parallel rank cost about the same."""
        costs = self._cost(batch.lengths("prompt_ids") + batch.lengths("response_ids"))
        return balanced_order(costs, derived.data_parallel_size(self.config))

    def _balanced(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """A call whose ranks get equal shares; its result in the order of `batch`."""
        order = self._order(batch)
        return as_batch(self.group.run(method, batch.reorder(order))).reorder(np.argsort(order))


def update_step(config: RunConfig) -> DataflowStep:
    """The columns that an update of the policy reads."""
    routes = (ROUTES,) if derived.replays_routes(config) else ()
    return DataflowStep("update", ("prompt_ids", "response_ids", *policy_loss_columns(config.actor), *routes))


def check_steps(config: RunConfig) -> None:
    """Before anything starts: every step's columns are there when it runs. SchemaError names the step and the
    column."""
    critic = derived.has_critic(config)
    reference = (
        ReferenceWorker.compute_ref_log_probs
        if derived.has_own_reference(config)
        else PolicyWorker.compute_ref_log_probs
    )
    check_dataflow(
        [
            generate_method(config),
            DataflowStep(
                "reward", ("response_ids", "data_source", "ground_truth", "extra_info"), ("response_text", "scores")
            ),
            *([RewardModelWorker.compute_scores] if derived.has_reward_model(config) else []),
            _log_prob_method(config),
            *([reference] if derived.needs_reference(config) else []),
            *([TeacherWorker.compute_teacher_top] if derived.has_teacher(config) else []),
            *([CriticWorker.compute_values] if critic else []),
            advantages_step(config),
            *([CriticWorker.update_critic] if critic else []),
            update_step(config),
        ],
        available=("uid", "prompt_ids", "data_source", "ground_truth", "extra_info", "index"),
    )


def _log_prob_method(config: RunConfig) -> Callable[..., Any]:
    if config.actor.router_replay == "r2":
        return PolicyWorker.compute_log_probs_and_routes
    return (
        PolicyWorker.compute_log_probs_along_routes
        if derived.needs_engine_routes(config)
        else PolicyWorker.compute_log_probs
    )


def merge(reports: Sequence[dict[str, Any]], observed: Mapping[str, float] | None = None) -> Update:
    """One update's reports of all data-parallel ranks as means over tokens (or whatever each metric counts).

    `observed` holds for the whole step and is added to each of its updates.
    """
    totals: dict[str, list[float]] = {}
    for report in reports:
        for name, (total, count) in report["sums"].items():
            seen = totals.setdefault(name, [0.0, 0.0])
            seen[0] += total
            seen[1] += count
    info = reports[0]["info"]
    means = {name: total / max(count, 1.0) for name, (total, count) in totals.items()} | dict(observed or {})
    return Update(means, info["grad_norm"], info["lr"], bool(info["applied"]))
