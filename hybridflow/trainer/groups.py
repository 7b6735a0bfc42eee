"""The loop's roles over worker groups: which rows each rank gets, what is sent, and how results are
merged."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import ROUTED, ROUTES, SUPPORT, DataProto
from hybridflow.config import derived
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import RunConfig
from hybridflow.data.balancing import SequenceCost
from hybridflow.data.custom import COLUMNS
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
from hybridflow.trainer.observations import memory_metrics, model_metrics, replay_metrics
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
    """Say what computes the policy's layers, and record it in the run's `environment.json`."""
    facts: Mapping[str, str] = actor.run(PolicyWorker.describe, role="actor")
    note_in_environment(run_dir, "policy", facts)
    say("the policy computes with " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if derived.needs_support(config):
        say(
            "log-probs are over what each token was sampled among (docs/algorithms.md), without "
            "the log-prob kernel"
        )
    if facts["backend"] == "torch (cuda)":
        say(
            "warning: Transformer Engine could not be imported, so layers on GPUs are torch's: "
            "slower, without its fused kernels; docs/platforms.md lists what is off"
        )


class ModelGroup:
    """`Role` over Megatron ranks, in processes of the role's own or in the policy's.

    Args:
        role: its section of `config`.
        address: its name among the roles of the processes, where that is another one.
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
        """Call a worker method of the role. Paths arrive absolute: ranks have another working
        directory."""
        return await self._begin(method, *args)

    def _begin(self, method: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """A call that the ranks have when this returns."""
        resolved = (value.resolve() if isinstance(value, Path) else value for value in args)
        return self.workers.call(method, *resolved, role=self.address)

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """A call whose ranks get shares of equal cost; its result is in the order of `batch`."""
        order = balanced_order(self._costs(batch), self._data_parallel)
        share = batch.select(method_spec(method).read_of(batch)).reorder(order)
        found: DataProto = await self.call(method, share)
        return found.reorder(np.argsort(order))

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> list[Update]:
        """Optimizer updates, merged over the data-parallel ranks. With a `seed` the role's epochs,
        whose mini-batches the seed draws from the whole batch: the same on any number of ranks."""
        if seed is None:
            return merged([await self.call(method, batch)])
        return merged([await call for call in self._epochs(method, batch, seed)])

    async def memory(self) -> Mapping[str, float]:
        """Peaks of the methods, and what lay off the device, since the last call."""
        return memory_metrics(await self.call(RoleWorker.take_observations), self.role)

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """Write the state to a new folder; in the background, return when it has been copied."""
        await self.call(RoleWorker.save, folder, phase, step, background)

    async def is_saved(self) -> bool:
        """Whether no rank is writing. CheckpointError when the last background save failed."""
        return all(await self.call(RoleWorker.is_saved))

    def _epochs(
        self, method: Callable[..., Any], batch: DataProto, seed: int, first: int = 0
    ) -> list[Awaitable[Any]]:
        """The calls of the epochs from the `first` on; the ranks have all of them."""
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
        """Updates over a batch whose consecutive pieces are the shares of the ranks; `without` some
        columns."""
        rows = derived.role_samples_per_mini_batch(self.config, self.role) // self._data_parallel
        share = batch.select([name for name in self._reads(method) if name not in without])
        return self._begin(method, share, rows, *args)

    def _order(self, batch: DataProto, seed: Sequence[int]) -> np.ndarray:
        """[ranks, rows] the rows of an epoch's mini-batches, one mini-batch after another."""
        rows = derived.role_samples_per_mini_batch(self.config, self.role)
        ranks = self._data_parallel
        return update_order(self._costs(batch), ranks, rows, seed).reshape(ranks, -1)

    def _reads(self, method: Callable[..., Any]) -> Sequence[str]:
        return method_spec(method).reads

    def _costs(self, batch: DataProto) -> np.ndarray:
        """[B] what each row costs to compute."""
        return self._cost(batch.lengths("prompt_ids") + batch.lengths("response_ids"))


class FrozenGroup(ModelGroup):
    """A role that does not train, in processes of its own. Ranks that are lost start again within
    the step: its weights are all its state. Ranks read them at their start, or a restart hook of
    `workers` fills them.

    Args:
        told: about each restart, in one line.
    """

    def __init__(
        self, workers: WorkerGroup, role: str, config: RunConfig, told: Callable[[str], None]
    ) -> None:
        super().__init__(workers, role, config)
        self._group = workers
        self._restarts = RestartLimit(config.trainer.max_restarts)
        self._told = told

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a worker method of the role; the call is made again when ranks are lost in it.

        Raises:
            HybridFlowError: what the ranks raised; or of their loss, when `trainer.max_restarts`
                are used up.
        """
        while True:
            try:
                return await super().call(method, *args)
            except HybridFlowError as error:
                if self._group.is_alive() or not self._restarts.take():
                    raise
                reason = str(error).splitlines()[0]
            self._told(f"the ranks of the {self.role.replace('_', ' ')} start again: {reason}")
            await self._group.restart()


class PolicyGroup(ModelGroup):
    """The policy: adds to its updates what its ranks have noticed in the step."""

    def __init__(
        self, workers: WorkerGroup | InProcessGroup, config: RunConfig, address: str | None = None
    ) -> None:
        super().__init__(workers, "actor", config, address)
        self._unobserved = False

    async def log_probs(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys; with router replay the experts of each token."""
        # the last step did not update the policy (critic warm-up, a lost rank): its counts are of
        # another batch
        if self._unobserved:
            await self.call(PolicyWorker.take_observations)
        self._unobserved = True
        return await self.compute(log_prob_method(self.config), batch)

    async def later_log_probs(self, batch: DataProto, seed: int) -> DataProto:
        """old_log_probs and entropys of the rows that are not in the first mini-batch of `seed`, as
        the ranks will hold these rows."""
        return await self.log_probs(batch.rows(self._first_and_later(batch, seed)[1]))

    async def update_and_score(
        self, batch: DataProto, seed: int, later: DataProto | None = None
    ) -> tuple[list[Update], DataProto]:
        """All updates of a step whose first mini-batch no pass has scored. Returns them, and in the
        order of `batch` the rows of that mini-batch (with `later`, all rows) with old_log_probs and
        entropys."""
        method = PolicyWorker.update_policy
        rows, others = self._first_and_later(batch, seed)
        offload = self.config.actor.offload
        if later is not None and (offload.gradients or offload.optimizer):
            await self.call(
                RoleWorker.wake, ("gradients", "optimizer")
            )  # once for both calls; training's end offloads them
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
        """The rows of the first mini-batch of the first epoch, and all others, each as the ranks
        hold them."""
        share = derived.samples_per_mini_batch(self.config) // self._data_parallel
        order = self._order(batch, (seed, 0))
        return order[:, :share].reshape(-1), order[:, share:].reshape(-1)

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> list[Update]:
        """Optimizer updates; those of a step of reinforcement learning say how replay went and what
        memory was taken.

        Raises:
            RouterReplayError: replay was not live in the step that `batch` went through.
        """
        updates = await super().update(method, batch, seed)
        return updates if seed is None else await self._observed(updates, batch)

    async def _observed(self, updates: Sequence[Update], batch: DataProto) -> list[Update]:
        """The updates with what the ranks have noticed since the step began."""
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
        return update_step(self.config).reads


def update_step(config: RunConfig) -> DataflowStep:
    """The columns that an update of the policy reads: what its loss declares, and routes where they
    are replayed, and the sampler's support where it is cut."""
    routes = (ROUTES,) if derived.replays_routes(config) else ()
    support = SUPPORT if derived.needs_support(config) else ()
    columns = policy_loss_columns(config.actor, derived.old_log_probs_column(config))
    return DataflowStep("update", ("prompt_ids", "response_ids", *columns, *routes, *support))


def check_steps(config: RunConfig) -> None:
    """Check, before anything starts, that every step's columns are written by an earlier step.

    Raises:
        SchemaError: names the step and the column.
    """
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
            *([ModelWorker.update_critic] if "critic" in names else []),
            # of the first update, for those after it
            *([] if scored else [PolicyWorker.take_update_log_probs]),
            update_step(config),
        ],
        available=("uid", *COLUMNS),
    )


def role_pass(role: str, config: RunConfig) -> Callable[..., Any]:
    """The worker method of the pass of a role other than the policy."""
    if role == "teacher":
        return teacher_method(config.actor.distillation)
    if role == "reference" and not derived.has_own_reference(config):
        return PolicyWorker.compute_ref_log_probs
    return PASSES[role]


def log_prob_method(config: RunConfig) -> Callable[..., Any]:
    """The worker method that computes old_log_probs under the router replay of the
    configuration."""
    if config.actor.router_replay == "r2":
        return PolicyWorker.compute_log_probs_and_routes
    if derived.needs_engine_routes(config):
        return PolicyWorker.compute_log_probs_along_routes
    return PolicyWorker.compute_log_probs


def merged(results: Iterable[Sequence[Sequence[dict[str, Any]]]]) -> list[Update]:
    """The updates of calls that train, in order; of each call, the reports of every rank."""
    return [merge(reports) for ranks in results for reports in zip(*ranks, strict=True)]


def merge(reports: Sequence[dict[str, Any]]) -> Update:
    """One update's reports of all data-parallel ranks as means over tokens (or whatever each metric
    counts)."""
    totals: dict[str, list[float]] = {}
    for report in reports:
        for name, (total, count) in report["sums"].items():
            seen = totals.setdefault(name, [0.0, 0.0])
            seen[0] += total
            seen[1] += count
    info = reports[0]["info"]
    means = {name: total / max(count, 1.0) for name, (total, count) in totals.items()}
    return Update(means, info["grad_norm"], info["lr"], bool(info["applied"]))
