"""The run as its flow sees it: steps, samples, calls of the roles, advantages and the weight sync.

Passes of roles with devices of their own run at the same time (`devices`). The policy's weights are
all that the next answers need, so that the update of a critic that shares no devices with policy
and engines lasts into the generation of the next step, and its own step is recorded after that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.entries import FLOWS
from hybridflow.config.registry import describe_error
from hybridflow.config.schema import RunConfig
from hybridflow.errors import FlowError, HybridFlowError
from hybridflow.observe.progress import Progress
from hybridflow.rollout.protocols import Engines, SyncReport
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.devices import Devices
from hybridflow.trainer.flow_roles import (
    Call,
    Critic,
    Reference,
    RewardModel,
    Teacher,
    TrainedPolicy,
    Updating,
)
from hybridflow.trainer.phases import Phases
from hybridflow.trainer.protocols import Policy, Role
from hybridflow.trainer.records import Records, Trained
from hybridflow.trainer.samples import Samples
from hybridflow.trainer.session import Session

T = TypeVar("T")


def message_of(name: str, error: BaseException) -> str:
    """The message of an error in a user's flow, with the flow, the line, and the type of an error
    that is not ours."""
    said = describe_error(error, Path(name.rpartition(":")[0]))
    if isinstance(error, HybridFlowError):
        said = said.removeprefix(f"{type(error).__name__}: ")
    return f"algorithm.flow={name}: {said}"


class Trainer(Protocol):
    """The parts of a run (`trainer.loop.RLTrainer`)."""

    config: RunConfig
    session: Session
    policy: Policy
    others: dict[str, Role]
    engines: Engines
    samples: Samples
    advantages: Advantages
    devices: Devices
    phases: Phases
    records: Records
    state: dict[str, Any]
    step: int
    last: int
    left_out: set[str]

    async def save(self) -> Path:
        """Checkpoint after the present step."""


class FlowRun:
    """`flows.base.Run`, from the trainer's present step on.

    Args:
        last: the step after which the run ends.
        is_tracing: whether this is the check over invented rows (`trainer.flow_check`).
    """

    def __init__(
        self, trainer: Trainer, progress: Progress, last: int, is_tracing: bool = False
    ) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.devices = trainer.devices
        self.progress = progress
        self.last = last
        self.is_tracing = is_tracing
        self.flow = FLOWS.get(derived.flow_name(trainer.config))
        self._session = trainer.session
        self._spans = ExitStack()  # of the open step
        self._calls: list[Call | Updating] = []  # of the open step
        self._batch: DataProto | None = None  # of the open step, as far as it is computed
        self._trained: Trained | None = None  # the open step, from its first update on
        self._unrecorded: Trained | None = None  # the step before, whose critic may still learn
        self._memory = AsyncExitStack()  # ends what `Phases.training` began
        self._is_open = False
        self._has_begun = False
        self._roles = self._all_roles()

    def _all_roles(self) -> dict[str, Any]:
        config = self.config
        others = self.trainer.others
        anchor = others.get("reference") or self.trainer.policy
        # the samples of a dump have its scores, and pairs need none
        scores = config.trainer.rollouts_from is None and config.data.answers != "pairs"
        return {
            "policy": TrainedPolicy(self, self.trainer.policy),
            "critic": Critic(self, "critic", others.get("critic")),
            "reference": Reference(
                self, "reference", anchor if derived.needs_reference(config) else None
            ),
            "reward_model": RewardModel(
                self, "reward_model", others.get("reward_model") if scores else None
            ),
            "teacher": Teacher(self, "teacher", others.get("teacher")),
        }

    def _role(self, name: str) -> Any:
        if name not in self.flow.roles:
            raise FlowError(
                f"run.{name} is called, and the flow declares roles={self.flow.roles}; add it there"
            )
        return self._roles[name]

    # ---- what a flow calls

    @property
    def policy(self) -> TrainedPolicy:
        """The model that is trained."""
        return cast(TrainedPolicy, self._role("policy"))

    @property
    def critic(self) -> Critic:
        """The value model."""
        return cast(Critic, self._role("critic"))

    @property
    def reference(self) -> Reference:
        """The anchor of KL terms."""
        return cast(Reference, self._role("reference"))

    @property
    def reward_model(self) -> RewardModel:
        """A model that scores answers."""
        return cast(RewardModel, self._role("reward_model"))

    @property
    def teacher(self) -> Teacher:
        """A model that the policy learns from."""
        return cast(Teacher, self._role("teacher"))

    @property
    def state(self) -> dict[str, Any]:
        """Values of the flow's own, which a checkpoint holds."""
        return self.trainer.state

    def steps(self) -> AsyncIterator[int]:
        """The numbers of the steps that are left."""
        return _Steps(self)

    async def samples(self, *, greedy: bool = False) -> DataProto:
        """The samples of the step. From here on the devices' memory is the policy's."""
        step = self._open_step("samples()")
        if self._batch is not None:
            raise FlowError("samples() is called twice in a step")
        self._batch = await self.trainer.samples.take(step, greedy=greedy)
        if not self.config.trainer.rollout_only:
            await self._memory.enter_async_context(self.trainer.phases.training())
        return self._batch

    async def all(self, *calls: Awaitable[DataProto]) -> DataProto:
        """The batch of the calls with the columns of all of them."""
        of_roles = [call for call in calls if isinstance(call, Call)]
        if not calls or len(of_roles) < len(calls):
            raise FlowError("all(...) takes calls of roles over a batch, at least one")
        for call in of_roles:
            call.is_awaited = True
        await self.devices.finish(*[task for one in of_roles for task in (*one.tasks, *one.others)])
        batch = of_roles[0].batch
        for call in of_roles:
            for task in call.tasks:
                batch = batch.union(task.result())
        self._batch = batch
        await self.record()  # the critic has ended its update of the step before
        return batch

    def advantages(self, batch: DataProto) -> DataProto:
        """The batch with advantages.

        Raises:
            LogprobMismatchError: engines and trainer differ by more than the bound.
        """
        with self._session.timeline.phase("adv"):
            batch = self.trainer.samples.keep(self.trainer.advantages.add(batch))
        if self.scores_first:
            self.check_log_probs(batch)
        self._batch = batch
        return batch

    def later(self, update: Awaitable[None]) -> None:
        """Let an update of the critic last beyond the step."""
        if not isinstance(update, Updating) or update.name != "critic.update":
            raise FlowError("later(...) takes an update of the critic: run.critic.update(batch)")
        update.leave()

    async def sync(self) -> None:
        """Bring the policy's weights to the engines where somebody is going to ask these: answers
        are sampled, or a validation follows."""
        step = self._open_step("sync()")
        if self._trained is None:
            raise FlowError("sync() comes after policy.update(batch)")
        await self._end_training()
        if self.config.data.answers == "sampled" or self._validates(step):
            with self._session.timeline.phase("update_weights"):
                self._trained.synced = await self.bring_weights()

    # ---- what its roles ask

    @property
    def step(self) -> int:
        """The number of the present step."""
        return self.trainer.step

    @property
    def seed(self) -> int:
        """Seed of the step's mini-batches, the same in a resumed run."""
        return self.config.seed * 1_000_003 + self.step

    @property
    def scores_first(self) -> bool:
        """Whether a pass of its own computes old log-probs of all rows of this step; otherwise its
        first update reports those of its rows."""
        return (
            derived.scores_before_update(self.config)
            or self.step <= self.config.trainer.critic_warmup
        )

    def begin(self, role: str, phase: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run the work of a role, `actor` for the policy, when its devices are free."""
        return self.devices.call(role, phase, self.step, work)

    def note(self, call: Call | Updating) -> None:
        """Keep a call until the end of its step, by when it is awaited."""
        self._open_step(call.name)
        self._calls.append(call)

    def training_on(self, batch: DataProto, update: str) -> Trained:
        """The record of the open step, in which this update learns from the batch.

        Raises:
            FlowError: the step has had it.
        """
        step = self._open_step(f"{update}(batch)")
        if any(call.name == update for call in self._calls):
            raise FlowError(f"step {step}: {update}(batch) is called twice; it makes all updates")
        if self._trained is None:
            self._trained = Trained(step, batch, batch, {})
        return self._trained

    def check_log_probs(self, batch: DataProto) -> None:
        """Record how far engines and trainer differ.

        Raises:
            LogprobMismatchError: by more than the bound.
        """
        self.trainer.records.check_log_probs(batch, self.step)

    async def bring_weights(self) -> SyncReport:
        """Send the present weights to the engines; say which engines were left out or have joined
        again."""
        trainer = self.trainer
        async with trainer.phases.sync():
            synced = await trainer.engines.sync(self.step)
        for engine, why in synced.stale.items():
            if engine in trainer.left_out:
                continue  # said already
            self.progress.message(
                f"step {self.step}: {engine} is left out until it takes new weights: {why}"
            )
        for engine in sorted(trainer.left_out - synced.stale.keys()):
            self.progress.message(f"step {self.step}: {engine} has taken weights again")
        trainer.left_out = set(synced.stale)
        return synced

    # ---- steps

    async def follow(self) -> None:
        """Run the flow to the end of its last step."""
        try:
            await self.flow.body(self)
            if self._is_open:  # the flow ends the run before its last step
                self.last = self.step
                await self.end_step()
        except BaseException:
            for call in self._calls:
                if isinstance(call, Updating):
                    call.leave()  # Python reports a coroutine that never began
            await self._memory.__aexit__(*sys.exc_info())
            self._spans.__exit__(*sys.exc_info())
            raise
        if not self._has_begun:
            raise FlowError(
                "the flow has ended without a step: it needs `async for _ in run.steps():`"
            )

    def begin_step(self) -> int:
        """Begin the next step, and return its number."""
        self.trainer.step += 1
        self._is_open = True
        self._has_begun = True
        self._spans.enter_context(self._session.timed("seconds_grpo"))
        self._spans.enter_context(self._session.timeline.phase("step", self.step))
        self._spans.enter_context(self._session.controlled())
        return self.step

    async def end_step(self) -> None:
        """End the open step, if there is one: validate where that is due, record and save."""
        if not self._is_open:
            return
        forgotten = [call.name for call in self._calls if not call.is_awaited]
        if forgotten:
            raise FlowError(f"step {self.step}: {', '.join(forgotten)} is never awaited")
        trained = self._trained
        batch = self._batch
        await self._end_training()
        if not self.config.trainer.rollout_only:
            await self._serve_engines()
        if trained is not None:
            trained.metrics = {**self.trainer.samples.metrics, **self.trainer.advantages.metrics}
        self._spans.close()
        self._is_open = False
        self._calls = []
        self._batch = None
        self._trained = None
        if trained is not None:
            await self.record()
            self._unrecorded = trained
            if trained.critic is None or trained.critic.done():
                await self.record()
        elif batch is not None:
            self.trainer.records.rollouts(self.step, batch, self.progress)
        if self.config.trainer.rollout_only:
            await self._session.stop_if_asked()
            return
        await self._session.store.check()
        await self._save_if_due()

    async def record(self) -> None:
        """Record the step that was trained last, if it is not recorded yet; waits for its critic.

        Raises:
            HybridFlowError: a gradient was not finite, and the configuration stops the run on that.
        """
        trained = self._unrecorded
        if trained is None:
            return
        if trained.critic is not None:
            trained.updates["critic"] = await self.devices.result(trained.critic)
        self._unrecorded = None
        await self.trainer.records.trained(trained, self.progress)

    def _open_step(self, what: str) -> int:
        if not self._is_open:
            raise FlowError(f"{what} outside of a step; call it in `async for _ in run.steps():`")
        return self.step

    def _validates(self, step: int) -> bool:
        every = self.config.trainer.test_every_steps
        return step == self.trainer.last or self._session.is_due(every, step)

    async def _end_training(self) -> None:
        """Wait for the updates that the next answers need; the policy's memory is free then."""
        if self._trained is not None:
            await self.devices.finish_pool("actor")
            # engines on the critic's devices wait for it
            await self.devices.finish_pool("rollout")
        await self._memory.aclose()

    async def _serve_engines(self) -> None:
        """Give the engines the weights of this step where somebody asks them after it, and validate
        where that is due.

        Raises:
            FlowError: the policy was updated, and the flow has not brought its weights to them.
        """
        phase = self._session.timeline.phase
        trained = self._trained
        validates = self._validates(self.step)
        samples = self.config.data.answers == "sampled"
        synced = None if trained is None else trained.synced
        if trained is not None and synced is None and samples:
            raise FlowError(
                f"step {self.step}: the policy was updated, and its weights were not brought to "
                "the engines; call `await run.sync()` after policy.update(batch)"
            )
        if synced is None and (samples or validates):
            with phase("update_weights"):
                synced = await self.bring_weights()
            if trained is not None:
                trained.synced = synced
        if validates:
            with phase("testing"):
                await self.trainer.records.validate(self.trainer.engines, self.step, self.progress)

    async def _save_if_due(self) -> None:
        """Checkpoint where one is due, after the last step, and where the run was asked to stop,
        which it then does."""
        is_last = self.step == self.last
        every = self.config.trainer.save_every_steps
        if self._session.is_due(every, self.step) or is_last or self._session.stop_asked:
            await self.record()  # the critic's update ends first
            with self._session.timeline.phase("save_checkpoint", self.step):
                await self.trainer.save()
            if not is_last:
                await self._session.stop_if_asked()


class _Steps(AsyncIterator[int]):
    """Not a generator, whose end would come when Python collects it."""

    def __init__(self, run: FlowRun) -> None:
        self.run = run

    async def __anext__(self) -> int:
        await self.run.end_step()
        if self.run.step >= self.run.last:
            raise StopAsyncIteration
        return self.run.begin_step()
