"""The loop's roles, implemented on worker groups: distributes rows over ranks, prepares arguments
and merges results."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import ROUTED, ROUTES, SUPPORT, DataProto
from hybridflow.config import derived
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import RunConfig
from hybridflow.data.balancing import SequenceCost
from hybridflow.data.custom import COLUMNS
from hybridflow.data.image_tokens import IMAGES
from hybridflow.data.packing import balanced_order, update_order
from hybridflow.dispatch import DataflowStep, check_dataflow, method_spec
from hybridflow.errors import HybridFlowError
from hybridflow.observe.environment import note_in_environment
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.rollout.evaluation import GREEDY, SCORING
from hybridflow.rollout.recorded import READING
from hybridflow.rollout.requests import concat
from hybridflow.rollout.service import collect_method
from hybridflow.single_controller import InProcessGroup, WorkerGroup
from hybridflow.trainer.advantages import advantages_step
from hybridflow.trainer.metrics import memory_metrics, model_metrics, replay_metrics
from hybridflow.trainer.protocols import Update
from hybridflow.workers.losses import policy_loss_columns
from hybridflow.workers.model_role import PASSES, ModelWorker, teacher_method
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.role import RoleWorker


def tell_backend(
    actor: WorkerGroup | InProcessGroup,
    config: RunConfig,
    run_dir: Path,
    say: Callable[[str], None],
) -> None:
    """Report the backend that computes the policy's layers, and record it in the run's
    `environment.json`."""
    facts: Mapping[str, str] = actor.run(PolicyWorker.describe, role="actor")
    note_in_environment(run_dir, "policy", facts)
    say("the policy runs with " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if derived.needs_support(config):
        say(
            "log-probs are over each token's sampling candidates (docs/algorithms.md), without the "
            "log-prob kernel"
        )
    if facts["backend"] == "torch (cuda)":
        say(
            "warning: Transformer Engine could not be imported, so the GPU layers fall back to "
            "plain torch, which is slower and has no fused kernels; docs/platforms.md lists the "
            "disabled features"
        )


class ModelGroup:
    """Implementation of `Role` on training ranks, in separate processes or in the policy's
    processes.

    Args:
        role: name of the role's section in `config`.
        address: name of the role within its processes, if different.
    """

    def __init__(
        self,
        workers: WorkerGroup | InProcessGroup,
        role: str,
        config: RunConfig,
        address: str | None = None,
    ) -> None:
        self.workers = workers
        self.role = role
        self.address = address or role
        self.config = config
        self._cost = SequenceCost.of_model(derived.hf_config(config.model))
        self._data_parallel = derived.role_data_parallel_size(config, role)

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a worker method of the role. Paths are made absolute, because ranks use a different
        working directory."""
        return await self._begin(method, *args)

    def _begin(self, method: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Send a call to the ranks, and return an awaitable for its results."""
        resolved = (value.resolve() if isinstance(value, Path) else value for value in args)
        return self.workers.call(method, *resolved, role=self.address)

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """Call a method with the rows distributed so that all ranks have about the same cost. The
        result is in the order of `batch`.
        """
        order = balanced_order(self._costs(batch), self._data_parallel)
        share = batch.select(method_spec(method).read_of(batch)).reorder(order)
        found: DataProto = await self.call(method, share)
        return found.reorder(np.argsort(order))

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> list[Update]:
        """Run optimizer updates and merge their reports over data-parallel ranks. If `seed` is
        given, run the role's epochs; their mini-batches are drawn from the batch using the seed,
        independently of the number of ranks."""
        if seed is None:
            return merged([await self.call(method, batch)])
        return merged([await call for call in self._epochs(method, batch, seed)])

    async def memory(self) -> Mapping[str, float]:
        """Return the memory metrics collected since the last call: peaks per worker method, and
        offloaded bytes."""
        return memory_metrics(await self.call(RoleWorker.take_observations), self.role)

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """Write the state to a new folder. In background mode, return as soon as the state has been
        copied; writing continues asynchronously."""
        await self.call(RoleWorker.save, folder, phase, step, background)

    async def is_saved(self) -> bool:
        """Return True if no rank is writing. Raises CheckpointError if the last background save
        failed."""
        return all(await self.call(RoleWorker.is_saved))

    def _epochs(
        self, method: Callable[..., Any], batch: DataProto, seed: int, first: int = 0
    ) -> list[Awaitable[Any]]:
        """Send the calls for epoch `first` and all later epochs, and return awaitables for their
        results.
        """
        return [
            self._train(method, batch.rows(self._order(batch, (seed, epoch)).reshape(-1)))
            for epoch in range(first, getattr(self.config, self.role).ppo_epochs)
        ]

    def _train(
        self,
        method: Callable[..., Any],
        batch: DataProto,
        *args: Any,
        without: tuple[str, ...] = (),
    ) -> Awaitable[Any]:
        """Start updates on a batch that is split into consecutive pieces, one per rank. Columns in
        `without` are not sent."""
        rows = derived.role_samples_per_mini_batch(self.config, self.role) // self._data_parallel
        share = batch.select([name for name in self._reads(method) if name not in without])
        return self._begin(method, share, rows, *args)

    def _order(self, batch: DataProto, seed: Sequence[int]) -> np.ndarray:
        """Return the row indices of an epoch's mini-batches, one mini-batch after another: [ranks,
        rows]."""
        rows = derived.role_samples_per_mini_batch(self.config, self.role)
        ranks = self._data_parallel
        return update_order(self._costs(batch), ranks, rows, seed).reshape(ranks, -1)

    def _reads(self, method: Callable[..., Any]) -> Sequence[str]:
        return method_spec(method).reads

    def _costs(self, batch: DataProto) -> np.ndarray:
        """Return the compute cost of each row [B]."""
        return self._cost(batch.lengths("prompt_ids") + batch.lengths("response_ids"))


class FrozenGroup(ModelGroup):
    """A role that runs in separate processes and does not train. Lost ranks are restarted within
    the step, because the weights are the role's only state: ranks load them at startup, or a
    restart hook of `workers` sends them.

    Args:
        told: called with a one-line message whenever ranks are restarted.
    """

    def __init__(
        self, workers: WorkerGroup, role: str, config: RunConfig, told: Callable[[str], None]
    ) -> None:
        super().__init__(workers, role, config)
        self._group = workers
        self._restarts = RestartLimit(config.trainer.max_restarts)
        self._told = told

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a worker method of the role. The call is repeated if ranks are lost during it.

        Raises:
            HybridFlowError: an error raised by the ranks, or the loss of ranks once
                `trainer.max_restarts` is used up.
        """
        while True:
            try:
                return await super().call(method, *args)
            except HybridFlowError as error:
                if self._group.is_alive() or not self._restarts.take():
                    raise
                reason = str(error).splitlines()[0]
            self._told(f"restarting the ranks of the {self.role.replace('_', ' ')}: {reason}")
            await self._group.restart()


class PolicyGroup(ModelGroup):
    """The policy's ranks. The observations that they collect during a step are added to the metrics
    of the step's updates.
    """

    def __init__(
        self, workers: WorkerGroup | InProcessGroup, config: RunConfig, address: str | None = None
    ) -> None:
        super().__init__(workers, "actor", config, address)
        self._unobserved = False

    async def start_profile(self) -> None:
        """Start profiling a step on the ranks listed in `trainer.profile`."""
        await self.call(PolicyWorker.start_profile)

    async def stop_profile(self, folder: Path) -> list[str]:
        """Write the profiles to `folder`. Returns one error message for each profile that could not
        be written.
        """
        return [reason for reason in await self.call(PolicyWorker.stop_profile, folder) if reason]

    async def log_probs(self, batch: DataProto) -> DataProto:
        """Return old_log_probs and entropys; with router replay, also each token's experts."""
        # the last step did not update the policy (critic warm-up, a lost rank), so the counts
        # belong to another batch
        if self._unobserved:
            await self.call(PolicyWorker.take_observations)
        self._unobserved = True
        return await self.compute(log_prob_method(self.config), batch)

    async def later_log_probs(self, batch: DataProto, seed: int) -> DataProto:
        """Return old_log_probs and entropys for the rows outside the first mini-batch of `seed`,
        ordered by the rank that will train on them."""
        return await self.log_probs(batch.rows(self._first_and_later(batch, seed)[1]))

    async def update_and_score(
        self, batch: DataProto, seed: int, later: DataProto | None = None
    ) -> tuple[list[Update], DataProto]:
        """Run all updates of a step whose first mini-batch has no old log-probs yet. Returns the
        updates, and the rows of that mini-batch (or all rows if `later` is given) in the order of
        `batch`, with old_log_probs and entropys.
        """
        method = PolicyWorker.update_policy
        rows, others = self._first_and_later(batch, seed)
        offload = self.config.actor.offload
        if later is not None and (offload.gradients or offload.optimizer):
            await self.call(
                RoleWorker.wake, ("gradients", "optimizer")
            )  # once for both calls; they are offloaded after training
        begun = rows if later is not None else self._order(batch, (seed, 0)).reshape(-1)
        updates = merged(
            [await self._train(method, batch.rows(begun), True, without=("old_log_probs",))]
        )
        found: DataProto = await self.call(
            PolicyWorker.take_update_log_probs, batch.select(["uid"]).rows(rows)
        )
        if later is not None:
            updates += merged([await self._train(method, batch.rows(others).union(later))])
            rows = np.concatenate([rows, others])
            found = concat([found, later])
        by_row = np.argsort(rows)
        scored = batch.rows(rows[by_row]).union(found.rows(by_row))
        rest = self._epochs(method, scored if len(scored) == len(batch) else batch, seed, first=1)
        updates += merged([await call for call in rest])
        return await self._observed(updates, batch), scored

    def _first_and_later(self, batch: DataProto, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two index arrays, each ordered by rank: the rows of the first epoch's first
        mini-batch, and all other rows.
        """
        share = derived.samples_per_mini_batch(self.config) // self._data_parallel
        order = self._order(batch, (seed, 0))
        return order[:, :share].reshape(-1), order[:, share:].reshape(-1)

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> list[Update]:
        """Run optimizer updates. In a reinforcement-learning step, the metrics of the updates
        include router replay and memory use.

        Raises:
            RouterReplayError: router replay was not active for all tokens of `batch` in this step.
        """
        updates = await super().update(method, batch, seed)
        return updates if seed is None else await self._observed(updates, batch)

    async def _observed(self, updates: Sequence[Update], batch: DataProto) -> list[Update]:
        """Add the ranks' observations since the start of the step to the metrics of the updates."""
        observations = await self.call(PolicyWorker.take_observations)
        self._unobserved = False
        lengths = (batch.lengths("prompt_ids"), batch.lengths("response_ids"))
        actor = self.config.actor
        observed = memory_metrics(observations, self.role) | model_metrics(observations)
        routed = [batch[ROUTED]] if ROUTED in batch else []
        observed |= replay_metrics(
            observations, *lengths, actor.router_replay, actor.ppo_epochs, *routed
        )
        return [
            Update({**one.means, **observed}, one.grad_norm, one.lr, one.applied) for one in updates
        ]

    def _reads(self, method: Callable[..., Any]) -> Sequence[str]:
        return self._update_reads

    @cached_property
    def _update_reads(self) -> Sequence[str]:
        return update_step(self.config).reads


def update_step(config: RunConfig) -> DataflowStep:
    """Return the columns that a policy update reads: those declared by the loss, the routes if they
    are replayed, the sampling support if sampling is truncated, and the images if there are any."""
    routes = (ROUTES,) if derived.replays_routes(config) else ()
    support = SUPPORT if derived.needs_support(config) else ()
    images = () if config.data.image_key is None else IMAGES
    columns = policy_loss_columns(config.actor, derived.old_log_probs_column(config))
    reads = ("prompt_ids", "response_ids", *columns, *routes, *support, *images)
    return DataflowStep("update", reads)


def check_steps(config: RunConfig) -> None:
    """Check, before anything starts, that all columns read by a step are written by an earlier
    step. A run that only generates has no steps after generation and scoring.

    Raises:
        SchemaError: a column is missing. The message names the step and the column.
    """
    if config.trainer.rollout_only:
        return
    scored = derived.scores_before_update(config) or derived.scores_later_rows(config)
    own = [log_prob_method(config)] if scored else []
    if derived.needs_sum_pi_squared(config):
        own.append(PolicyWorker.compute_sum_pi_squared)
    names = sorted(derived.models_in_use(config), key=lambda name: ROLES[name].turn)
    passes = [own if name == "actor" else [role_pass(name, config)] for name in names]
    generating = (
        DataflowStep("generate", ("prompt_ids",), method_spec(collect_method(config)).writes),
        SCORING,
    )
    check_dataflow(
        [
            *([READING] if config.data.answers == "pairs" else generating),
            *itertools.chain(*passes),
            *([GREEDY] if "greedy_scores" in advantages_step(config).reads else []),
            advantages_step(config),
            *([ModelWorker.update_critic] if derived.critics(config) else []),
            # reported by the first update for later ones
            *([] if scored else [PolicyWorker.take_update_log_probs]),
            update_step(config),
        ],
        available=("uid", *COLUMNS, *(() if config.data.image_key is None else IMAGES)),
    )


def role_pass(role: str, config: RunConfig) -> Callable[..., Any]:
    """Return the worker method that runs the forward pass of a role other than the policy."""
    if role == "teacher":
        return teacher_method(config.actor.distillation)
    if role == "reference" and not derived.has_own_reference(config):
        return PolicyWorker.compute_ref_log_probs
    return PASSES[ROLES[role].head]


def log_prob_method(config: RunConfig) -> Callable[..., Any]:
    """Return the worker method that computes old_log_probs with the configured router replay."""
    if config.actor.router_replay == "r2":
        return PolicyWorker.compute_log_probs_and_routes
    if derived.needs_engine_routes(config):
        return PolicyWorker.compute_log_probs_along_routes
    return PolicyWorker.compute_log_probs


def merged(results: Iterable[Sequence[Sequence[dict[str, Any]]]]) -> list[Update]:
    """Merge the reports of training calls into updates, in order. `results` contains the reports of
    each call, indexed by rank."""
    return [merge(reports) for ranks in results for reports in zip(*ranks, strict=True)]


def merge(reports: Sequence[dict[str, Any]]) -> Update:
    """Merge one update's reports from all data-parallel ranks into means over tokens (or over the
    count reported with each metric)."""
    totals: dict[str, list[float]] = {}
    for report in reports:
        for name, (total, count) in report["sums"].items():
            seen = totals.setdefault(name, [0.0, 0.0])
            seen[0] += total
            seen[1] += count
    info = reports[0]["info"]
    means = {name: total / max(count, 1.0) for name, (total, count) in totals.items()}
    return Update(means, info["grad_norm"], info["lr"], bool(info["applied"]))
