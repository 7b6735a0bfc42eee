"""Additional policies of a run (`roles`): their components, and how a flow's steps use them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import FlowError
from hybridflow.rollout.answering import Prompt, samples
from hybridflow.rollout.protocols import Engines, SyncReport
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.devices import Devices, Phases
from hybridflow.trainer.flow_api import (
    Call,
    Noting,
    Pending,
    Updating,
    checked_batch,
    joined,
    refuse_nonfinite,
)
from hybridflow.trainer.flow_roles import TrainedPolicy
from hybridflow.trainer.groups import role_pass
from hybridflow.trainer.protocols import Policy
from hybridflow.trainer.records import Trained
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.role import RoleWorker

T = TypeVar("T")


@dataclass
class Learner:
    """An additional policy of a run.

    Attributes:
        config: the run's configuration, adapted to this policy (`derived.policy_view`).
        keep: moves token columns created on the driver to the object store, where workers read
            them.
        folder: folder for weights copied from another policy.
        frozen: True if it has no optimizer.
        base: the policy whose weights it shares (`PolicyConfig.base`).
        left_out: engines excluded from the last sync.
    """

    name: str
    config: RunConfig
    policy: Policy
    engines: Engines
    tokenizer: Tokenizer
    keep: Callable[[DataProto], DataProto]
    folder: Path
    frozen: bool = False
    base: str | None = None
    advantages: Advantages = field(init=False)
    phases: Phases = field(init=False)
    left_out: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.advantages = Advantages(self.config)
        self.phases = Phases(self.config, self.policy, self.engines)

    async def generate(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """Generate `n` samples per prompt with the engines' current weights."""
        data = self.config.data
        return self.keep(await samples(self.engines, self.tokenizer, data, prompts, n))

    async def take(self, other: Policy, address: str = "") -> None:
        """Copy the weights of another policy that uses the same model. The two parallel layouts may
        differ. If both policies share the same base, only the adapters are copied; `address` is the
        other policy's name within the processes.
        """
        if self.base is not None:
            await self.policy.call(PolicyWorker.take_adapters, address)
            return
        await other.call(RoleWorker.export, self.folder)
        await self.policy.call(PolicyWorker.fill, self.folder)


class WholeRun(Noting, Protocol):
    """The subset of the run's interface (`trainer.run.FlowRun`) that additional policies need."""

    devices: Devices
    is_tracing: bool

    @property
    def step(self) -> int:
        """The number of the current step."""

    @property
    def seed(self) -> int:
        """Seed of the step's mini-batches."""

    def open_step(self, what: str) -> int:
        """Return the number of the open step. `what` is the call's name in error messages."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Attribute the time spent in the block to this phase of the step."""

    def with_own_columns(
        self, batch: DataProto, names: Sequence[str], added: dict[str, object] | None = None
    ) -> DataProto:
        """Validate the columns that the flow itself has created, and return the batch."""

    def check_log_probs(self, batch: DataProto, name: str = "") -> None:
        """Record the log-prob difference between a policy's engines and ranks."""

    def say_left_out(self, synced: SyncReport, before: set[str], whose: str = "") -> set[str]:
        """Report engines that were excluded or have rejoined. Returns the excluded engines."""


class OwnPolicy(TrainedPolicy):
    """Implementation of `flows.base.FurtherPolicy`."""

    def __init__(self, run: WholeRun, learner: Learner) -> None:
        self.part = part = PolicyPart(run, learner)
        super().__init__(part, learner.policy, learner.name)

    def update(self, batch: DataProto) -> Updating:
        """Run all updates of the step."""
        if self.part.learner.frozen:
            raise FlowError(
                f"{self.name}.update(batch): roles.{self.name}.frozen=true, so it has no "
                "optimizer; set it to false"
            )
        return super().update(batch)

    def take(self, other: TrainedPolicy) -> Awaitable[None]:
        """Copy the current weights of another policy that uses the same model to this policy's
        ranks and engines, and reset its optimizer, if it has one."""
        part = self.part
        name = f"{self.name}.take(...)"
        part.whole.open_step(name)
        if not isinstance(other, TrainedPolicy) or other is self:
            raise FlowError(f"{name}: expected another policy of the run, for example run.policy")
        if part.trained is not None:
            raise FlowError(f"{name} is not supported in a step that has updated the {self.name}")
        address = self._address(other, name)
        return Pending(part, name, lambda: part.take(other.role, address))

    def _address(self, other: TrainedPolicy, call: str) -> str:
        """Return the name of another policy within its processes.

        Raises:
            FlowError: this policy shares the first policy's weights, and the adapters to copy do
                not fit; or it trains adapters on separate weights, which copying would replace.
        """
        further = other.part.learner if isinstance(other, OwnPolicy) else None
        if self.part.learner.base is None:
            if self.part.config.actor.lora.rank and not self.part.learner.frozen:
                raise FlowError(
                    f"{call} would replace the base weights of the {self.name} but keep its "
                    f"adapters; set roles.{self.name}.base=policy to copy adapters, or "
                    f"roles.{self.name}.actor.lora.rank=0"
                )
            return ""
        if further is not None and further.base is None:
            raise FlowError(
                f"{call} would replace the weights that the {self.name} shares with the policy; "
                f"copy from a policy with the same base, or remove roles.{self.name}.base"
            )
        ours, theirs = self.part.config.actor.lora, other.run.config.actor.lora
        for key in ("rank", "alpha", "targets"):
            if (own := getattr(ours, key)) != (given := getattr(theirs, key)):
                raise FlowError(
                    f"{call} copies adapters, but roles.{self.name}.actor.lora.{key}={own} differs "
                    f"from the other policy's {given}; set them to the same value"
                )
        return "actor" if further is None else further.name

    def _of_reference(self, batch: DataProto) -> list[asyncio.Task[DataProto]]:
        """Return the tasks that compute ref_log_probs with the policy's initial weights; empty if
        neither its loss nor its estimator reads ref_log_probs.
        """
        if not derived.needs_reference(self.part.config):
            return []
        computing = self.role.compute(role_pass("reference", self.part.config), batch)
        return [self.part.begin("actor", "ref", computing)]

    def advantages(self, batch: DataProto) -> DataProto:
        """Return the batch with advantages computed from its scores."""
        given = checked_batch(batch, f"{self.name}.advantages")
        with self.part.calling():
            return self.part.add_advantages(given)


class PolicyPart:
    """The state of an additional policy during a run's steps. Implements the part of the run's
    interface that `TrainedPolicy` needs.

    Attributes:
        holds_memory: True while device memory is reserved for the policy: from its first pass in a
            step to the sync.
        trained: record of the policy's update in the open step.
        synced: report of the policy's sync in the open step.
    """

    def __init__(self, whole: WholeRun, learner: Learner) -> None:
        self.whole = whole
        self.learner = learner
        self.name = learner.name
        self.config = learner.config
        self.devices = whole.devices
        self.open_step = whole.open_step
        self.line = whole.line
        self.note = whole.note
        self.calling = whole.calling
        self.holds_memory = False
        self.trained: Trained | None = None
        self.synced: SyncReport | None = None
        self._added: dict[str, object] = {}
        self._memory = AsyncExitStack()

    # ---- used by `TrainedPolicy`

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self.whole.step

    @property
    def seed(self) -> int:
        """Seed of the step's mini-batches, the same in a resumed run."""
        return self.whole.seed

    @property
    def scores_first(self) -> bool:
        """True if a separate pass computes old log-probs for all rows."""
        return derived.scores_before_update(self.config)

    def begin(self, role: str, phase: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run the work once the policy's devices are free."""
        is_first = not self.holds_memory
        self.holds_memory = True

        async def with_memory() -> T:
            if is_first:
                await self._memory.enter_async_context(self.learner.phases.training())
            return await work

        return self.devices.call(self.name, f"{self.name}/{phase}", self.step, with_memory())

    async def merged(self, calls: Sequence[Call]) -> DataProto:
        """Return the batch passed to the calls, with the columns that they add."""
        return await joined(calls, self.devices.finish)

    def training_on(self, batch: DataProto, update: str) -> Trained:
        """Create the record of the policy's update in the open step, and return it.

        Raises:
            FlowError: the step already has an update, or the batch has the wrong number of rows.
        """
        step = self.whole.open_step(update)
        if self.trained is not None:
            raise FlowError(f"step {step}: {update} was called twice; one call runs all updates")
        rows = derived.samples_per_step(self.config)
        if len(batch) != rows and not self.whole.is_tracing:
            raise FlowError(
                f"{update}: got {len(batch)} rows, expected {rows} per step: train_batch_size "
                f"{self.config.data.train_batch_size} x rollout.n {self.config.rollout.n} of "
                f"roles.{self.name}. Change these, or keep all rows and exclude some with "
                "`run.leave_out(batch, rows)`"
            )
        self.trained = Trained(step, batch, batch, {})
        return self.trained

    def check_log_probs(self, batch: DataProto) -> None:
        """Record the log-prob difference between the policy's engines and its ranks."""
        self.whole.check_log_probs(batch, self.name)

    def with_own_columns(self, batch: DataProto, names: Sequence[str]) -> DataProto:
        """Validate the columns that the flow itself has created, and return the batch."""
        return self.whole.with_own_columns(batch, names, self._added)

    # ---- implementation of its calls

    async def generate(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """Generate `n` samples per prompt."""
        with self.whole.phase(f"{self.name}/gen"):
            return await self.learner.generate(prompts, n)

    async def take(self, other: Policy, address: str) -> None:
        """Copy the weights of another policy (see `Learner.take`)."""
        with self.whole.phase(f"{self.name}/take"):
            await self.learner.take(other, address)
        await self.sync()

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Return the batch with advantages.

        Raises:
            FlowError: the batch has no scores, or a score is not a finite number.
        """
        if "scores" not in batch:
            raise FlowError(
                f"{self.name}.advantages(batch): the batch has no scores; call `batch = "
                "batch.with_columns(scores=...)` with one number per row first"
            )
        scores = np.asarray(batch["scores"])
        if scores.shape != (len(batch),) or scores.dtype.kind not in "fiub":
            raise FlowError(
                f"{self.name}.advantages(batch): scores must be one number for each of the "
                f"{len(batch)} rows, got shape {list(scores.shape)} of {scores.dtype}"
            )
        batch = batch.with_columns(scores=scores.astype(np.float32))
        refuse_nonfinite(batch, "scores", self.step)
        with self.whole.phase(f"{self.name}/adv"):
            batch = self.learner.keep(self.learner.advantages.add(batch))
        if self.scores_first:
            self.check_log_probs(batch)
        self._added = dict(batch.items())
        return batch

    # ---- steps

    async def end_training(self) -> None:
        """Wait for the policy's updates and release its device memory."""
        if self.holds_memory:
            await self.devices.finish_pool(self.name)
        self.holds_memory = False
        await self._memory.aclose()

    async def sync(self) -> None:
        """Send the policy's weights to its engines. The time is recorded as a phase of the step."""
        await self.end_training()
        with self.whole.phase(f"{self.name}/update_weights"):
            self.synced = await self.bring_weights()

    async def bring_weights(self) -> SyncReport:
        """Send the policy's current weights to its engines, and report engines that were excluded
        or have rejoined."""
        learner = self.learner
        async with learner.phases.sync():
            synced = await learner.engines.sync(self.step)
        learner.left_out = self.whole.say_left_out(synced, learner.left_out, f"{self.name} ")
        return synced

    def close_step(self) -> Trained | None:
        """Close the open step. Returns the record of the policy's update, or None."""
        trained = self.trained
        if trained is not None:
            trained.synced = self.synced
            trained.metrics = dict(self.learner.advantages.metrics)
        self.learner.advantages.metrics = {}
        self.trained = self.synced = None
        self._added = {}
        return trained
