"""The loop's train group and rollout service over worker groups: what runs where, and what crosses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.config import derived
from hybridflow.config.schema import OptimConfig, RunConfig, SamplingConfig
from hybridflow.data.balancing import SequenceCost
from hybridflow.data.packing import balanced_order
from hybridflow.dispatch import DataflowStep, check_dataflow
from hybridflow.engines.client import EngineSilent
from hybridflow.engines.keeper import EngineState
from hybridflow.errors import EngineError, EnginesLostError
from hybridflow.protocol import DataProto
from hybridflow.residency import Part
from hybridflow.routes import ROUTES
from hybridflow.single_controller import Future, WorkerGroup
from hybridflow.trainer.observations import memory_metrics, model_metrics, replay_metrics
from hybridflow.trainer.protocols import Update
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_node import RolloutNodeWorker
from hybridflow.workers.teacher import TeacherWorker
from hybridflow.workers.value_roles import CriticWorker, RewardModelWorker

_SETTLE_S, _SETTLE_POLL_S = 10.0, 0.2  # an engine that answers no longer is found dead within a few seconds, or it hangs
_log = logging.getLogger(__name__)


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
        if self._unobserved:  # the last step did not update the policy (critic warm-up, a lost rank): its counts are of another batch
            self.group.run(PolicyWorker.take_observations)
        self._unobserved = True
        return self._balanced(_log_prob_method(self.config), batch)

    def ref_log_probs(self, batch: DataProto) -> DataProto:
        """See TrainGroup."""
        return self._balanced(PolicyWorker.compute_ref_log_probs, batch)

    def update(self, batch: DataProto, seed: int) -> Sequence[Update]:
        """See TrainGroup."""
        rows = derived.samples_per_mini_batch(self.config) // derived.data_parallel_size(self.config)
        columns = ["prompt_ids", "response_ids", "old_log_probs", "advantages"]
        if "ref_log_probs" in batch:
            columns.append("ref_log_probs")
        if derived.replays_routes(self.config):
            columns.append(ROUTES)
        share = batch.select(columns).reorder(self._order(batch))
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
        """Peaks of memory and the replayed routes of the step that `batch` went through. Raises when replay was not live."""
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
        return _batch(self.group.run(method, batch.reorder(order))).reorder(np.argsort(order))


class EngineGroup:
    """`RolloutService` over SGLang engines, one worker beside each.

    Args:
        group: those workers (`RolloutWorker`).
        stop_ids: tokens that end a response.
        others: of engines over several nodes, the workers on the nodes but the first (`RolloutNodeWorker`).
    """

    def __init__(self, group: WorkerGroup, config: RunConfig, stop_ids: Sequence[int], others: WorkerGroup | None = None) -> None:
        self.group, self.config, self.stop_ids, self.others = group, config, list(stop_ids), others
        self.stale = dict.fromkeys(range(group.world_size), "no weights yet")
        self._ready: Future | None = group.submit(RolloutWorker.wait_ready, timeout=config.rollout.start_timeout_s + 30)

    def check_starting(self) -> None:
        """Raise at once when an engine has failed to start; return when all is well so far."""
        if self._ready is not None and self._ready.done():
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all engines serve."""
        if self._ready is not None:
            self._ready.result()
            self._ready = None

    def generate(self, prompts: DataProto, sampling: SamplingConfig) -> DataProto:
        """See RolloutService. Only engines that took the last weights get rows; when one dies over them, the others answer all again.

        Raises:
            EnginesLostError: there are no others. The lost ones are being started again, and hold no weights.
            EngineError: an engine refused, and lives.
        """
        limit, timeout = self.config.data.max_response_length, self.config.rollout.request_timeout_s + 30
        while True:
            healthy = [number for number in range(self.group.world_size) if number not in self.stale]
            arguments = (prompts, sampling, limit, self.stop_ids)
            # only of samples that are trained on: routes are large, and validation has no use for them
            method = _generate_method(self.config, training=sampling == self.config.rollout.sampling)
            try:
                return _batch(self.group.run(method, *arguments, timeout=timeout, only=healthy))
            except EngineError as error:
                lost = self._lost(error)
                if not lost.keys() - self.stale.keys():
                    raise
                self.quarantine(self.stale | lost)
                if len(self.stale) == self.group.world_size:
                    reasons = "\n".join(f"  - {why}" for why in self.stale.values())
                    raise EnginesLostError(f"no engine is left that could answer: {str(error).splitlines()[0]}\n{reasons}") from error
                _log.warning("an engine was lost while it generated; the others answer its prompts: %s", error)

    def _lost(self, error: EngineError) -> dict[int, str]:
        """Engines that are not up, after an error of one; one that hangs is given up."""
        silent, settled = isinstance(error, EngineSilent), time.monotonic() + _SETTLE_S
        while True:
            states = self.states(busy_s=self.config.rollout.request_timeout_s)  # the others may still answer their share
            lost = {n: f"{state.name} is {state.state}: {state.reason}" for n, state in enumerate(states) if state.state != "up"}
            if lost.keys() - self.stale.keys() or not silent:
                return lost
            if time.monotonic() > settled:
                silent = False
                hanging = [number for number, state in enumerate(states) if state.name == error.engine]
                if hanging:
                    self.group.run(RolloutWorker.replace_engine, str(error).splitlines()[0], only=hanging)
            time.sleep(_SETTLE_POLL_S)

    def workers_alive(self) -> bool:
        """Whether every engine's worker still runs, on each of its nodes."""
        return self.group.is_alive() and (self.others is None or self.others.is_alive())

    def restart_workers(self) -> None:
        """Start all workers, and with them all engines, again (`WorkerGroup.restart`, whose hooks let them take weights)."""
        if self.others is not None and not self.others.is_alive():
            self.others.restart()  # before the first nodes: it is theirs to say when an engine starts
        self.group.restart()

    def begin_again(self) -> None:
        """After the workers were started again: wait for their engines, which hold no weights."""
        self.stale = dict.fromkeys(range(self.group.world_size), "no weights yet")
        self._ready = self.group.submit(RolloutWorker.wait_ready, timeout=self.config.rollout.start_timeout_s + 30)
        self.wait_ready()

    def states(self, wait_s: float = 0.0, busy_s: float = 0.0) -> list[EngineState]:
        """How each engine stands; dead ones are started again. Waits up to `wait_s` for restarts under way.

        Args:
            busy_s: how long a worker may still be at an earlier call before it answers.

        Raises:
            WorkerError: a worker is gone. Without one of another node an engine cannot start again, and would wait for it in vain.
        """
        if self.others is not None:
            self.others.run(RolloutNodeWorker.is_following, timeout=60)
        states: list[EngineState] = self.group.run(RolloutWorker.engine_state, wait_s, timeout=wait_s + busy_s + 60)
        return states

    def quarantine(self, stale: Mapping[int, str]) -> None:
        """From now on these engines, and no others, get no requests; `stale` says why."""
        for number in sorted(stale.keys() - self.stale.keys()):
            _log.warning("engine-%d gets no requests: %s", number, stale[number])
        for number in sorted(self.stale.keys() - stale.keys()):
            _log.info("engine-%d gets requests", number)
        self.stale = dict(stale)

    def sleep(self) -> None:
        """See RolloutService."""
        self.group.run(RolloutWorker.sleep)

    def wake(self, tags: Sequence[str]) -> None:
        """See RolloutService."""
        self.group.run(RolloutWorker.wake, list(tags))

    def stop(self) -> None:
        """End the engines."""
        self.group.run(RolloutWorker.stop, timeout=30)


def check_steps(config: RunConfig) -> None:
    """Before anything starts: every step's columns are there when it runs. SchemaError names the step and the column."""
    with_reference = derived.needs_reference(config)
    written = ("old_log_probs", "ref_log_probs") if with_reference else ("old_log_probs",)
    routes = (ROUTES,) if derived.replays_routes(config) else ()
    critic, model = derived.has_critic(config), derived.has_reward_model(config)
    reference = ReferenceWorker.compute_ref_log_probs if derived.has_own_reference(config) else PolicyWorker.compute_ref_log_probs
    teacher = [TeacherWorker.compute_teacher_top] if derived.has_teacher(config) else []
    inputs = ("scores", "uid", *(["values"] if critic else []), *(["rm_scores"] if model else []))
    check_dataflow(
        [
            _generate_method(config),
            DataflowStep("reward", ("response_ids", "data_source", "ground_truth", "extra_info"), ("response_text", "scores")),
            *([RewardModelWorker.compute_scores] if model else []),
            _log_prob_method(config),
            *([reference] if with_reference else []),
            *teacher,
            *([CriticWorker.compute_values] if critic else []),
            DataflowStep("advantages", (*inputs, *written), ("rewards", "advantages", *(["returns"] if critic else []))),
            *([CriticWorker.update_critic] if critic else []),
            DataflowStep("update", ("prompt_ids", "response_ids", "advantages", *written, *routes)),
        ],
        available=("uid", "prompt_ids", "data_source", "ground_truth", "extra_info", "index"),
    )


def _generate_method(config: RunConfig, training: bool = True) -> Callable[..., Any]:
    return RolloutWorker.generate_with_routes if training and derived.needs_engine_routes(config) else RolloutWorker.generate


def _log_prob_method(config: RunConfig) -> Callable[..., Any]:
    if config.actor.router_replay == "r2":
        return PolicyWorker.compute_log_probs_and_routes
    return PolicyWorker.compute_log_probs_along_routes if derived.needs_engine_routes(config) else PolicyWorker.compute_log_probs


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


def _batch(value: Any) -> DataProto:
    assert isinstance(value, DataProto), type(value)
    return value
