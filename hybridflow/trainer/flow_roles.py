"""Implementation of the roles that a flow calls. Each call is queued immediately for its role's
devices; awaiting it returns its columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.role_table import CRITICS, ROLES
from hybridflow.config.schema import RunConfig
from hybridflow.errors import FlowError
from hybridflow.rollout.answering import Prompt
from hybridflow.trainer.devices import Devices
from hybridflow.trainer.flow_api import Call, Noting, Pending, Updating, checked_batch
from hybridflow.trainer.groups import role_pass
from hybridflow.trainer.protocols import Policy, Role
from hybridflow.trainer.records import Trained
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker

T = TypeVar("T")
PAIRS = ("prompt_ids", "chosen_ids", "rejected_ids")
_OF_CRITICS = ("values", "returns")


class OpenStep(Noting, Protocol):
    """The subset of the open step's interface that role calls need."""

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""

    @property
    def devices(self) -> Devices:
        """The device queues."""

    @property
    def step(self) -> int:
        """The number of the step."""

    @property
    def seed(self) -> int:
        """Seed of the step's mini-batches."""

    @property
    def scores_first(self) -> bool:
        """True if a separate pass computes old log-probs for all rows of this step."""

    def begin(self, role: str, phase: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work for a role (`actor` for the policy) once the role's devices are free."""

    def training_on(self, batch: DataProto, update: str) -> Trained:
        """Return the record of the step's updates, and create it on the step's first update."""

    def check_log_probs(self, batch: DataProto) -> None:
        """Record the log-prob difference between engines and trainer."""

    @property
    def holds_memory(self) -> bool:
        """True while device memory is reserved for the policy: from its first pass in a step to the
        sync.
        """

    async def generate(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """Generate `n` samples per prompt with the engines' current weights."""

    def open_step(self, what: str) -> int:
        """Return the number of the open step. `what` is the call's name in error messages."""

    def with_own_columns(self, batch: DataProto, names: Sequence[str]) -> DataProto:
        """Validate those of the named columns that the flow has created, and return the batch."""


class _Role:
    """A role of a run. If the run does not have the role, its calls compute nothing."""

    def __init__(self, run: OpenStep, name: str, role: Role | None) -> None:
        self.run = run
        self.name = name
        self.role = role

    def _compute(self, name: str, batch: DataProto) -> Call:
        """Run the role's forward pass on a batch."""
        call = f"{self.name}.{name}"
        checked_batch(batch, call)
        tasks = []
        if self.role is not None:
            # a coroutine that exists before its turn would be left behind by a run that stops
            compute = partial(self.role.compute, role_pass(self.name, self.run.config), batch)
            results = self._results(compute)
            tasks.append(self.run.begin(self.name, ROLES[self.name].phase, results))
        return Call(self.run, f"{call}(batch)", batch, tasks)

    async def _results(self, compute: Callable[[], Awaitable[DataProto]]) -> DataProto:
        """Run a forward pass, and return its columns under the names used in flows."""
        return await compute()


class RecordingStep(OpenStep, Protocol):
    """The open step's interface, extended with the step's metrics."""

    metrics: dict[str, float]


class _Frozen(_Role):
    """A role that runs forward passes but is never trained."""

    def update(self, batch: DataProto) -> NoReturn:
        """Raise FlowError, because this role cannot be trained."""
        raise FlowError(
            f"{self.name}.update(batch): the {self.name.replace('_', ' ')} cannot be trained; "
            f"only run.policy, run.{', run.'.join(CRITICS.values())} can be updated"
        )


class Reference(_Frozen):
    """Implementation of `flows.base.Reference`, on the policy's ranks or on separate ones."""

    def log_probs(self, batch: DataProto) -> Call:
        """Add ref_log_probs."""
        return self._compute("log_probs", batch)


class Teacher(_Frozen):
    """Implementation of `flows.base.Teacher`."""

    def log_probs(self, batch: DataProto) -> Call:
        """Add the teacher columns that the loss reads."""
        return self._compute("log_probs", batch)


class RewardModel(_Role):
    """Implementation of `flows.base.RewardModel`."""

    run: RecordingStep

    def scores(self, batch: DataProto) -> Call:
        """Add rm_scores [B]."""
        return self._compute("scores", batch)

    def update(self, pairs: DataProto) -> Updating:
        """Run one update on preference pairs of answers."""
        run = self.run
        name = "reward_model.update(pairs)"
        if self.role is None or not run.config.reward_model.trains:
            raise FlowError(f"{name}: set reward_model.path and reward_model.trains=true")
        given = checked_batch(pairs, "reward_model.update")
        missing = [column for column in PAIRS if column not in given]
        ranks = derived.role_data_parallel_size(run.config, "reward_model")
        whole = len(given) - len(given) % ranks
        if missing or not whole:
            what = f"column {missing[0]!r}" if missing else "pairs"
            raise FlowError(
                f"{name}: the batch has no {what}; it must have the columns {', '.join(PAIRS)} and "
                f"at least one pair for each of the {ranks} data-parallel ranks"
            )
        run.open_step(name)
        learning = self.role.update(ModelWorker.pair_step, given.rows(slice(0, whole)))
        learned = run.begin(self.name, "update_reward_model", learning)

        async def finish() -> None:
            for update in await run.devices.result(learned):
                found = {**update.means, "grad_norm": update.grad_norm, "lr": update.lr}
                run.metrics |= {f"reward_model/{key}": value for key, value in found.items()}

        return Updating(run, name, finish)


class Critic(_Role):
    """Implementation of `flows.base.Critic`. On the ranks, every critic's columns are named
    `values` and `returns`.
    """

    def values(self, batch: DataProto) -> Call:
        """Add values."""
        return self._compute("values", batch)

    async def _results(self, compute: Callable[[], Awaitable[DataProto]]) -> DataProto:
        found = await compute()
        return found.rename({"values": f"{ROLES[self.name].prefix}values"})

    def update(self, batch: DataProto) -> Updating:
        """Run all of the step's updates."""
        run = self.run
        name = f"{self.name}.update(batch)"
        entry = ROLES[self.name]
        if self.role is None:
            raise FlowError(
                f"{name}: this run has no {self.name.replace('_', ' ')}; set {entry.comes_with} to "
                "add one"
            )
        trained = run.training_on(checked_batch(batch, f"{self.name}.update"), name)
        batch = run.with_own_columns(batch, [f"{entry.prefix}returns"])
        if entry.prefix:
            batch = batch.drop([one for one in _OF_CRITICS if one in batch])
            batch = batch.rename({f"{entry.prefix}{one}": one for one in _OF_CRITICS})
        learning = self.role.update(ModelWorker.update_critic, batch, run.seed)
        learned = run.begin(self.name, f"update_{self.name}", learning)
        trained.critics[self.name] = learned
        return Updating(run, name, lambda: run.devices.finish(learned))


# {role other than the policy: its interface for flows}
CALLS: dict[str, type[_Role]] = {
    **dict.fromkeys(CRITICS.values(), Critic),
    "reference": Reference,
    "reward_model": RewardModel,
    "teacher": Teacher,
}


class TrainedPolicy:
    """Implementation of `flows.base.Policy`.

    Args:
        name: the policy's name in the flow.
    """

    def __init__(self, run: OpenStep, role: Policy, name: str = "policy") -> None:
        self.run = run
        self.role = role
        self.name = name
        self._scores_later = derived.scores_later_rows(run.config)
        # {step: log-probs of the rows that its first update does not report}
        self._later: dict[int, asyncio.Task[DataProto]] = {}

    def generate(self, prompts: Sequence[Prompt], n: int | None = None) -> Pending[DataProto]:
        """Generate `n` (default `rollout.n`) samples for each prompt (a text, or a list of chat
        messages)."""
        run = self.run
        name = f"{self.name}.generate(...)"
        run.open_step(name)
        if isinstance(prompts, str) or not len(prompts):
            raise FlowError(f"{name} requires a list with at least one prompt")
        if run.holds_memory:
            raise FlowError(
                f"{name} was called after the policy's passes but before the sync, while its "
                "engines have stale weights or have released their memory; call it before those "
                "passes, or after `await run.sync()`"
            )
        count = run.config.rollout.n if n is None else n
        return Pending(run, name, lambda: run.generate(list(prompts), count))

    def log_probs(self, batch: DataProto) -> Call:
        """Add old_log_probs and entropys, and sum_pi_squared if the estimator reads it. If the
        first update reports these values for its own rows, only the rows of later updates are
        computed, and no columns are added.
        """
        run = self.run
        name = f"{self.name}.log_probs(batch)"
        checked_batch(batch, f"{self.name}.log_probs")
        if run.scores_first:
            scoring = run.begin("actor", "old_log_prob", self.role.log_probs(batch))
            tasks = [scoring]
            if derived.needs_sum_pi_squared(run.config):
                squared = self._sum_pi_squared(batch, scoring)
                tasks.append(run.begin("actor", "sum_pi_squared", squared))
            return Call(run, name, batch, [*tasks, *self._of_reference(batch)])
        if not self._scores_later:
            return Call(run, name, batch, self._of_reference(batch))
        later = run.begin("actor", "old_log_prob", self.role.later_log_probs(batch, run.seed))
        self._later = {run.step: later}
        return Call(run, name, batch, self._of_reference(batch), [later])

    def _of_reference(self, batch: DataProto) -> list[asyncio.Task[DataProto]]:
        """Return the tasks of reference passes that the flow does not request explicitly."""
        return []

    def update(self, batch: DataProto) -> Updating:
        """Run all of the step's updates. Does nothing while the critic warms up."""
        run = self.run
        name = f"{self.name}.update(batch)"
        trained = run.training_on(checked_batch(batch, f"{self.name}.update"), name)
        later = self._later.get(run.step)
        is_scored = "old_log_probs" in batch if run.scores_first else later is not None
        if not is_scored and (run.scores_first or self._scores_later):
            raise FlowError(
                f"{name}: the old log-probs have not been computed; call `await "
                f"run.{self.name}.log_probs(batch)` first"
            )
        if "advantages" not in batch:
            whose = "" if self.name == "policy" else f".{self.name}"
            raise FlowError(
                f"{name}: the batch has no advantages; call `batch = run{whose}.advantages(batch)` "
                "first"
            )
        batch = run.with_own_columns(batch, ["advantages"])
        if run.step <= run.config.trainer.critic_warmup:
            return Updating(run, name, lambda: asyncio.sleep(0))
        if run.scores_first:
            learning = self.role.update(PolicyWorker.update_policy, batch, run.seed)
            update = run.begin("actor", "update_actor", learning)

            async def finish() -> None:
                trained.updates["actor"] = await run.devices.result(update)

            return Updating(run, name, finish)
        scoring = self.role.update_and_score(batch, run.seed, later.result() if later else None)
        self._later = {}
        both = run.begin("actor", "update_actor", scoring)

        async def finish_both() -> None:
            trained.updates["actor"], trained.scored = await run.devices.result(both)
            # raises before the update is returned to anyone
            run.check_log_probs(trained.scored)

        return Updating(run, name, finish_both)

    async def _sum_pi_squared(
        self, batch: DataProto, log_probs: asyncio.Task[DataProto]
    ) -> DataProto:
        return await self.role.compute(
            PolicyWorker.compute_sum_pi_squared, batch.union(await log_probs)
        )
