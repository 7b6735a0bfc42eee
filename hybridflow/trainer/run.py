"""Implementation of the run that a flow drives: steps, samples, role calls, advantages and the
weight sync.

Passes of roles with separate devices run concurrently (`devices`). Generation needs only the
policy's weights, so the update of a critic on separate devices may overlap the next step's
generation. In this case, the step is recorded when that update has finished.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config import derived
from hybridflow.config.entries import FLOWS, flow_options
from hybridflow.config.registry import is_user_entry
from hybridflow.config.schema import RunConfig
from hybridflow.errors import FlowError
from hybridflow.flows.base import Body
from hybridflow.observe.progress import Progress
from hybridflow.rollout.answering import Prompt
from hybridflow.rollout.protocols import Engines, SyncReport
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.devices import Devices, Phases
from hybridflow.trainer.flow_api import Call, FlowApi, Pending, Updating, joined, refuse_nonfinite
from hybridflow.trainer.flow_roles import CALLS, TrainedPolicy
from hybridflow.trainer.flow_watch import FlowWatch
from hybridflow.trainer.own_policies import Learner, OwnPolicy, PolicyPart
from hybridflow.trainer.profiling import StepProfiles
from hybridflow.trainer.protocols import Policy, Role
from hybridflow.trainer.records import Records, Trained
from hybridflow.trainer.samples import Samples
from hybridflow.trainer.session import Session

T = TypeVar("T")
_UPDATE = "policy.update(batch)"


class Trainer(Protocol):
    """The components of a run (`trainer.loop.RLTrainer`)."""

    config: RunConfig
    session: Session
    policy: Policy
    others: dict[str, Role]
    learners: dict[str, Learner]
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
        """Save a checkpoint after the current step."""


class FlowRun:
    """Runs a flow, starting at the trainer's current step.

    Attributes:
        metrics: metrics recorded by the flow in the open step.
        called: names of all calls that the flow has made.
        api: the object that is passed to the flow.
        doubts: warnings collected by the check.
        parts: state of the additional policies in the open step.

    Args:
        last: the last step of the run.
        is_tracing: True for the check with synthetic rows (`trainer.flow_check`).
    """

    def __init__(
        self, trainer: Trainer, progress: Progress, last: int, is_tracing: bool = False
    ) -> None:
        name = derived.flow_name(trainer.config)
        self.trainer = trainer
        self.config = trainer.config
        self.devices = trainer.devices
        self.progress = progress
        self.last = last
        self.is_tracing = is_tracing
        self.flow = FLOWS.get(name)
        self.options = flow_options(trainer.config.algorithm)
        self._scores_before = derived.scores_before_update(trainer.config)
        self.metrics: dict[str, float] = {}
        self.called: set[str] = set()
        self.doubts: list[str] = []
        self._file = str(Path(name.rpartition(":")[0]).resolve()) if is_user_entry(name) else ""
        self._body: Any = None  # the coroutine
        self._watch = FlowWatch()
        # only the code of users is watched
        self.calling: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._file:
            self.calling = self._watch.calling
        self._session = trainer.session
        self._profiled = () if is_tracing else trainer.config.trainer.profile.steps
        self._profiles = StepProfiles(trainer.policy, trainer.session, progress.message)
        self._spans = ExitStack()  # of the open step
        self._calls: list[Pending[Any]] = []  # of the open step
        self._batch: DataProto | None = None  # of the open step, with the columns computed so far
        self._scores: np.ndarray | None = None  # [B] of the open step, as sampled
        self._added: dict[str, object] = {}  # columns added by the last `add_advantages`
        self._trained: Trained | None = None  # the open step, once its first update has been called
        # the previous step, whose critics may still be updating
        self._unrecorded: Trained | None = None
        self._memory = AsyncExitStack()  # exits `Phases.training`
        self.holds_memory = False  # True from the policy's first pass in a step to the sync
        self._is_open = False
        self._ends = False  # the flow has returned before its last step
        self._steps: AsyncIterator[int] | None = None  # the flow's current loop
        self._left: list[AsyncIterator[int]] = []  # earlier loops
        self._validated = 0  # the last step validated in this session
        self._saved = 0
        self.stop: Callable[[], Awaitable[None]] | None = None  # called after each step
        self.parts: Mapping[str, PolicyPart] = {}  # of additional policies
        self._roles = self._all_roles()
        self.api = FlowApi(self)

    def _all_roles(self) -> dict[str, Any]:
        config = self.config
        others = dict(self.trainer.others)
        if derived.needs_reference(config):
            others.setdefault("reference", self.trainer.policy)  # the reference is on its ranks
        if config.trainer.rollouts_from is not None or config.data.answers == "pairs":
            # dumps already contain its scores, and pairs need none
            others.pop("reward_model", None)
        policies = {name: OwnPolicy(self, one) for name, one in self.trainer.learners.items()}
        self.parts = {name: policy.part for name, policy in policies.items()}
        return {
            "policy": TrainedPolicy(self, self.trainer.policy),
            **{name: calls(self, name, others.get(name)) for name, calls in CALLS.items()},
            **policies,
        }

    # ---- calls of the flow (`flow_api`)

    def role(self, name: str) -> Any:
        """Return a role that the flow has declared.

        Raises:
            FlowError: the flow has not declared it; the message explains the fix.
        """
        flow = self.flow
        if name not in flow.roles:
            where = f" on line {flow.line}" if self._file else ""
            raise FlowError(
                f"run.{name} was called, but the flow declares only roles={flow.roles}; write "
                f"@flow({flow.name!r}, roles={(*flow.roles, name)}){where}"
            )
        return self._roles[name]

    @property
    def state(self) -> dict[str, Any]:
        """Values stored by the flow, which are saved in checkpoints."""
        return self.trainer.state

    async def take_samples(self, step: int, greedy: bool) -> DataProto:
        """Return the step's samples. From then until the sync, device memory is reserved for the
        policy.
        """
        if self._scores is not None:
            raise FlowError("samples() was called twice in a step")
        self._batch = await self.trainer.samples.take(step, greedy=greedy)
        self._scores = self._batch["scores"]
        if not self.config.trainer.rollout_only:
            await self._hold_memory()
        return self._batch

    async def generate(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """Generate `n` samples for each prompt created by the flow, using the engines' current
        weights."""
        samples = self.trainer.samples
        with self.phase("gen"):
            return await samples.of_prompts(prompts, n)

    async def _hold_memory(self) -> None:
        """Reserve device memory for the policy until the sync."""
        if not self.holds_memory:
            self.holds_memory = True
            await self._memory.enter_async_context(self.trainer.phases.training())

    async def merged(self, calls: Sequence[Call]) -> DataProto:
        """Return the batch passed to the calls, with the columns that they add."""
        self._batch = batch = await joined(calls, self.devices.finish)
        await self.record()  # the critic has finished the previous step's update
        return batch

    def add_advantages(self, batch: DataProto, of: str) -> DataProto:
        """Return the batch with advantages computed from a column.

        Raises:
            LogprobMismatchError: the log-probs of engines and trainer differ by more than the
                bound.
            FlowError: the flow has set a number that is not finite.
        """
        refuse_nonfinite(batch, of, self.step)
        with self._session.timeline.phase("adv"):
            batch = self.trainer.samples.keep(self.trainer.advantages.add(batch, of))
        if self.scores_first and of == "scores":
            self.check_log_probs(batch)
        self._added = dict(batch.items())
        self._batch = batch
        return batch

    async def bring_to_engines(self, step: int) -> None:
        """Send the weights of updated policies to their engines, if these engines will be used."""
        updated = [part for part in self.parts.values() if part.trained is not None]
        if not updated and not self._was_called(_UPDATE):
            raise FlowError("sync() must be called after policy.update(batch)")
        for part in updated:
            await part.sync()
        if self._trained is None or not self._was_called(_UPDATE):
            return
        await self._end_training()
        if self.config.data.answers == "sampled" or self._validates(step):
            with self._session.timeline.phase("update_weights"):
                self._trained.synced = await self.bring_weights()

    def line(self) -> int | None:
        """Return the line number in the user's file that is being executed, or None if execution is
        outside that file.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return frame.f_lineno
            frame = frame.f_back
        return None

    def body_line(self) -> int | None:
        """Return the line number at which the flow is executing or waiting."""
        frame = None if self._body is None else self._body.cr_frame
        return None if frame is None else frame.f_lineno

    def _watched(self) -> AbstractContextManager[None]:
        """Report the position of a user's flow that makes no calls for a long time. Does nothing
        during the check, which has a deadline."""
        if self.is_tracing or not self._file:
            return nullcontext()
        return self._watch.saying(
            self.progress.message,
            lambda: f"step {self.step}: the flow has been at line {self.body_line()}",
        )

    # ---- used by its roles

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self.trainer.step

    @property
    def seed(self) -> int:
        """Seed of the step's mini-batches, the same in a resumed run."""
        return self.config.seed * 1_000_003 + self.step

    @property
    def scores_first(self) -> bool:
        """True if a separate pass computes old log-probs for all rows of this step; otherwise the
        first update reports them for its rows."""
        return self._scores_before or self.step <= self.config.trainer.critic_warmup

    def begin(self, role: str, phase: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work for a role (`actor` for the policy) once the role's devices are free."""

        async def with_memory() -> T:
            await self._hold_memory()
            return await work

        # needed for flows that take no samples from the dataset
        holds = self.holds_memory or derived.pool_of(self.config, role) != "actor"
        return self.devices.call(role, phase, self.step, work if holds else with_memory())

    def note(self, call: Pending[Any]) -> None:
        """Register a call, which must be awaited before its step ends."""
        self.open_step(call.name)
        self._calls.append(call)
        self.called.add(call.name)

    def training_on(self, batch: DataProto, update: str) -> Trained:
        """Return the record of the open step's updates, and create it on the step's first update.

        Raises:
            FlowError: the step already has this update, or the rows cannot be divided into
                mini-batches.
        """
        step = self.open_step(update)
        if self._was_called(update):
            raise FlowError(f"step {step}: {update} was called twice; one call runs all updates")
        self._check_rows(batch, update)
        has_begun = any(isinstance(call, Updating) for call in self._calls)
        if self._trained is None or not has_begun:  # a rejected update leaves no record
            self._trained = Trained(step, batch, batch, {})
        return self._trained

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Attribute the time spent in the block to this phase of the step."""
        return self._session.timeline.phase(name)

    def with_own_columns(
        self, batch: DataProto, names: Sequence[str], added: dict[str, object] | None = None
    ) -> DataProto:
        """Validate the columns in `names` that the flow itself has created, and return the batch.
        Columns in `added` (default: the columns added by the last `advantages`) are not checked.

        Raises:
            FlowError: a column has a wrong shape, or contains a number that is not finite.
        """
        held = dict(batch.items())
        known = self._added if added is None else added
        own = [name for name in names if name in held and held[name] is not known.get(name)]
        columns = {}
        for name in own:
            column = batch[name]
            lengths = batch.lengths("response_ids").tolist()
            if not isinstance(column, Jagged) or column.lengths.tolist() != lengths:
                raise FlowError(
                    f"the column {name} must have one value per token of the answers; write "
                    "Jagged(values, batch['response_ids'].offsets)"
                )
            refuse_nonfinite(batch, name, self.step)
            columns[name] = Jagged(column.values.astype(np.float32, copy=False), column.offsets)
        return self.trainer.samples.keep(batch.with_columns(**columns)) if own else batch

    def _check_rows(self, batch: DataProto, update: str) -> None:
        """Check that the batch can be divided into mini-batches if its number of rows differs from
        the step's."""
        if self._scores is None or len(batch) == len(self._scores):
            return
        role = "actor" if update == _UPDATE else update.partition(".")[0]
        rows = derived.role_samples_per_mini_batch(self.config, role)
        text = (
            f"{update}: got {len(batch)} of {len(self._scores)} rows, but each update requires "
            f"{rows}: keep all rows, and exclude some from loss and statistics with `batch = "
            "run.leave_out(batch, rows)`"
        )
        if self.is_tracing and rows < derived.samples_per_step(self.config):
            self.doubts.append(text)
        elif self.is_tracing or not len(batch) or len(batch) % rows:
            raise FlowError(text)

    def check_log_probs(self, batch: DataProto, name: str = "") -> None:
        """Record the log-prob difference between engines and trainer. `name` is the name of an
        additional policy.

        Raises:
            LogprobMismatchError: the difference exceeds the bound.
        """
        self.trainer.records.check_log_probs(batch, self.step, name)

    async def bring_weights(self) -> SyncReport:
        """Send the current weights to the engines, and report engines that were excluded or have
        rejoined."""
        trainer = self.trainer
        async with trainer.phases.sync():
            synced = await trainer.engines.sync(self.step)
        trainer.left_out = self.say_left_out(synced, trainer.left_out)
        return synced

    def say_left_out(self, synced: SyncReport, before: set[str], whose: str = "") -> set[str]:
        """Report engines that were excluded or have rejoined. Returns the excluded engines."""
        for engine, why in synced.stale.items():
            if engine in before:
                continue  # already reported
            self.progress.message(
                f"step {self.step}: {whose}{engine} is excluded until it receives new weights: "
                f"{why}"
            )
        for engine in sorted(before - synced.stale.keys()):
            self.progress.message(
                f"step {self.step}: {whose}{engine} has received new weights and "
                "serves requests again"
            )
        return set(synced.stale)

    # ---- steps

    async def follow(self, body: Body | None = None) -> None:
        """Run the flow (or `body` in its place) until it returns or the last step has ended."""
        try:
            if body is not None:
                self._file = ""  # lines refer to the replaced flow's file
            self._body = (body or self.flow.body)(self.api)
            with self._watched():
                await self._body
            await self._end_early()
        except BaseException:
            await self._memory.__aexit__(*sys.exc_info())
            self._spans.__exit__(*sys.exc_info())
            raise

    async def next_step(self, steps: AsyncIterator[int]) -> int:
        """End the open step, begin the next one, and return its number.

        Raises:
            FlowError: another loop over steps has started within this one.
            StopAsyncIteration: there is no further step.
        """
        if self._steps is not steps and steps in self._left:
            raise FlowError(
                "nested loops over run.steps() are not supported: the inner loop consumed the "
                "steps; use one loop at a time"
            )
        if self._steps is not None and self._steps is not steps:
            self._left.append(self._steps)
        self._steps = steps
        await self.end_step()
        if self.stop is not None:
            await self.stop()
        if self.step >= self.last:
            raise StopAsyncIteration
        self.trainer.step += 1
        self._is_open = True
        self.trainer.advantages.metrics = {}
        self._spans.enter_context(self._session.timed("seconds_grpo"))
        self._spans.enter_context(self._session.timeline.phase("step", self.step))
        self._spans.enter_context(self._session.controlled())
        if self.step in self._profiled:
            await self._profiles.begin()
        return self.step

    async def end_step(self) -> None:
        """End the open step, if there is one: validate if due, record and save."""
        if not self._is_open:
            return
        forgotten = [call for call in self._calls if not call.is_awaited]
        if forgotten:
            name = forgotten[0].name
            raise FlowError(
                f"step {self.step}: run.{name} is never awaited; write `await run.{name}`",
                line=forgotten[0].line,
            )
        trained = self._trained
        batch = self._batch
        await self._end_training()
        if self.step in self._profiled:
            await self._profiles.end(self.step)
        if not self.config.trainer.rollout_only:
            await self._serve_engines()
        own = self._own_metrics(batch if trained is None else trained.batch)
        for part in self.parts.values():
            own |= self.trainer.records.of_policy(
                part.name, part.learner.tokenizer, part.close_step(), self.step
            )
        if trained is not None:
            trained.own = own
            with self._session.timeline.phase("engine_load"):  # requests to all engines
                load = await self.trainer.engines.load_metrics()
            trained.metrics = {
                **self.trainer.samples.metrics,
                **self.trainer.advantages.metrics,
                **load,
            }
        self._close_step()
        if trained is not None:
            await self.record()
            self._unrecorded = trained
            if all(update.done() for update in trained.critics.values()):
                await self.record()
        elif batch is not None:
            self.trainer.records.rollouts(self.step, batch, self.progress, own)
        if self.config.trainer.rollout_only:
            await self._session.stop_if_asked()
            return
        await self._session.store.check()
        await self._save_if_due()

    def _close_step(self) -> None:
        self._spans.close()
        self._is_open = False
        self._calls = []
        self._batch = None
        self._scores = None
        self._added = {}
        self._trained = None
        self.metrics = {}

    def _own_metrics(self, batch: DataProto | None) -> dict[str, float]:
        """Return the metrics that the flow has recorded in the open step, and the mean sampled
        score if the flow has replaced the scores.
        """
        before = self._scores
        if batch is None or before is None or np.array_equal(before, batch["scores"]):
            return dict(self.metrics)
        return {"critic/sampled_score/mean": float(np.mean(before)), **self.metrics}

    async def _end_early(self) -> None:
        """If the flow returned early, validate and save after its final step. A step in which the
        flow made no call is ignored.

        Raises:
            FlowError: the flow ran no step.
        """
        is_begun = self._steps is not None
        if self._is_open and not self._calls:
            self._close_step()
            self.trainer.step -= 1
        if self.step == 0 and not self._is_open:
            raise FlowError(
                "the flow ended without running a step; write `async for _ in run.steps():` and "
                "call a method of the run inside",
                line=self.flow.line,
            )
        if self.step >= self.last and not self._is_open:
            return
        left = self.last - self.step
        self._ends = True
        await self.end_step()
        if is_begun and not self.config.trainer.rollout_only:
            await self.record()
            if self._validated != self.step:
                await self.bring_weights()
                await self._validate()
            if self._saved != self.step:
                await self._save()
        if left:
            self.progress.message(f"the flow ended the run after step {self.step} of {self.last}")

    async def record(self) -> None:
        """Record the last trained step if it is not recorded yet, after waiting for its critics.

        Raises:
            HybridFlowError: a gradient was not finite, and the configuration stops the run in this
                case.
        """
        trained = self._unrecorded
        if trained is None:
            return
        for name, update in trained.critics.items():
            trained.updates[name] = await self.devices.result(update)
        self._unrecorded = None
        await self.trainer.records.trained(trained, self.progress)

    def open_step(self, what: str) -> int:
        """Return the number of the open step. `what` is the call's name in error messages.

        Raises:
            FlowError: no step is open.
        """
        if not self._is_open:
            why = "; another loop over run.steps() has consumed all of them" if self._left else ""
            raise FlowError(
                f"{what} was called outside a step{why}; call it inside `async for _ in "
                "run.steps():`"
            )
        return self.step

    def _was_called(self, name: str) -> bool:
        return any(call.name == name for call in self._calls)

    def _validates(self, step: int) -> bool:
        every = self.config.trainer.test_every_steps
        return self._ends or step == self.trainer.last or self._session.is_due(every, step)

    async def _end_training(self) -> None:
        """Wait for the updates that must finish before engines generate again, and release the
        policy's memory.
        """
        if self._trained is not None:
            await self.devices.finish_pool("actor")
            # engines on the critic's devices wait for it
            await self.devices.finish_pool("rollout")
        for part in self.parts.values():
            await part.end_training()
        self.holds_memory = False
        await self._memory.aclose()

    async def _serve_engines(self) -> None:
        """Send this step's weights to the engines if they will be used, and validate if due.

        Raises:
            FlowError: the policy was updated, but the flow has not sent its weights to the engines.
        """
        trained = self._trained
        validates = self._validates(self.step)
        samples = self.config.data.answers == "sampled"
        synced = None if trained is None else trained.synced
        updates = [call for call in self._calls if call.name == _UPDATE]
        if updates and synced is None and samples:
            raise FlowError(
                f"step {self.step}: the policy was updated, but its weights were not sent to the "
                "engines; call `await run.sync()` after policy.update(batch)",
                line=updates[0].line,
            )
        for part in self.parts.values():
            if part.trained is not None and part.synced is None:
                raise FlowError(
                    f"step {self.step}: the {part.name} was updated, but its weights were not sent "
                    f"to its engines; call `await run.sync()` after {part.name}.update(batch)"
                )
        if synced is None and (samples or validates):
            with self._session.timeline.phase("update_weights"):
                synced = await self.bring_weights()
            if trained is not None:
                trained.synced = synced
        if validates:
            await self._validate()

    async def _validate(self) -> None:
        with self._session.timeline.phase("testing"):
            await self.trainer.records.validate(self.trainer.engines, self.step, self.progress)
        self._validated = self.step

    async def _save_if_due(self) -> None:
        """Save a checkpoint if one is due, if this is the last step, or if a stop was requested. In
        the last case, also stop the run.
        """
        is_last = self._ends or self.step == self.last
        every = self.config.trainer.save_every_steps
        if self._session.is_due(every, self.step) or is_last or self._session.stop_asked:
            await self._save()
            if not is_last:
                await self._session.stop_if_asked()

    async def _save(self) -> None:
        await self.record()  # waits for the critic's update
        with self._session.timeline.phase("save_checkpoint", self.step):
            await self.trainer.save()
        self._saved = self.step
