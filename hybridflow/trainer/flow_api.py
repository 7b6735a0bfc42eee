"""The object passed to a flow's body, the calls that the flow makes and awaits, and checks of the
batches passed to them. `FlowApi` exposes exactly the attributes of `flows.base.Run`.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.role_table import CRITICS
from hybridflow.data.packing import without_rows
from hybridflow.errors import FlowError
from hybridflow.flows.base import ROLES

T = TypeVar("T")


class Noting(Protocol):
    """The subset of the run's interface that role calls need."""

    def line(self) -> int | None:
        """Return the line of the flow's file that is being executed; None outside of it."""

    def note(self, call: Pending[Any]) -> None:
        """Register a call, which must be awaited before its step ends."""

    def calling(self) -> AbstractContextManager[None]:
        """Attribute the time spent in the block to the run, not to the flow's own code."""

    async def merged(self, calls: Sequence[Call]) -> DataProto:
        """Return the batch passed to the calls, with the columns that they add."""


class Pending(Generic[T]):
    """A call made by a flow. It must be awaited exactly once, within its step.

    Attributes:
        name: the call as written in the flow after `run.`, for messages.
        line: line number of the call in the flow's file.
    """

    def __init__(self, run: Noting, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.name = name
        self.line = run.line()
        self.is_awaited = False
        self.run = run
        self._work = work
        run.note(self)

    def __await__(self) -> Generator[Any, None, T]:
        self.take()
        with self.run.calling():
            return (yield from self._work().__await__())

    def __getitem__(self, name: object) -> NoReturn:
        raise FlowError(_not_awaited(self))

    def take(self) -> None:
        """Mark the call as awaited. Raises FlowError if it already is."""
        if self.is_awaited:
            raise FlowError(
                f"run.{self.name} on line {self.line} is awaited twice; call it again, or store "
                "its result in a variable"
            )
        self.is_awaited = True


class Call(Pending[DataProto]):
    """A call on a batch. Its result is the batch with the columns that the call adds.

    Args:
        tasks: tasks that write columns.
        others: additional tasks to wait for.
    """

    def __init__(
        self,
        run: Noting,
        name: str,
        batch: DataProto,
        tasks: Sequence[asyncio.Task[DataProto]],
        others: Sequence[asyncio.Task[DataProto]] = (),
    ) -> None:
        self.batch = batch
        self.tasks = tasks
        self.others = others
        super().__init__(run, name, lambda: run.merged([self]))


async def joined(
    calls: Sequence[Call], finish: Callable[..., Coroutine[Any, Any, None]]
) -> DataProto:
    """Wait for the calls' tasks with `Devices.finish`, and return their batch with the columns that
    they add."""
    await finish(*[task for one in calls for task in (*one.tasks, *one.others)])
    batch = calls[0].batch
    for call in calls:
        for task in call.tasks:
            batch = batch.union(task.result())
    return batch


class Updating(Pending[None]):
    """A call that runs a role's updates in a step. Awaiting it waits for all of them to finish."""


def checked_calls(given: Sequence[object]) -> list[Call]:
    """Return the calls that `run.all(...)` joins. Raises FlowError unless all of them are forward
    passes on the same batch."""
    if not given:
        raise FlowError("all(...) requires at least one role call on a batch")
    calls = list[Call]()
    for one in given:
        if not isinstance(one, Call):
            raise FlowError(f"all(...) accepts only role calls on a batch: {_other(one)}")
        if calls and one.batch is not calls[0].batch:
            raise FlowError(
                f"all(...): {one.name} uses a different batch from {calls[0].name}, so its columns "
                "would be lost. Make all calls on the same batch, or await them one after another"
            )
        calls.append(one)
    for call in calls:
        call.take()
    return calls


def _other(given: object) -> str:
    """Describe an argument of `run.all` that is not a forward pass, and suggest a fix."""
    if isinstance(given, Updating):
        return (
            f"{given.name} adds no column; write `await run.{given.name}` on a separate line (an "
            "update of a critic may be passed to run.later)"
        )
    if isinstance(given, Pending):
        return f"{given.name} is not a role call; write `await run.{given.name}` on a separate line"
    if isinstance(given, DataProto):
        return "got a batch; remove `await` before the calls within all(...)"
    if isinstance(given, list | tuple):
        return "got a list of calls; write run.all(*calls)"
    _close(given)
    return f"got {_kind(given)}"


def checked_batch(given: object, call: str) -> DataProto:
    """Return the argument of `run.CALL(batch)`. Raises FlowError, whose message suggests a fix, if
    it is not a batch."""
    if isinstance(given, DataProto):
        return given
    if isinstance(given, Pending):
        raise FlowError(f"{call}(batch): expected a batch, got a call: {_not_awaited(given)}")
    _close(given)
    hint = ""
    if inspect.isawaitable(given):
        hint = ", which is not awaited; write `await` before the call"
    elif isinstance(given, list | tuple):
        hint = "; run.all(...) joins calls to one batch"
    elif given is None:
        hint = "; is a `return` missing in a function?"
    elif callable(given):
        hint = ", which is not called; add `()`"
    raise FlowError(f"{call}(batch): expected a batch, got {_kind(given)}{hint}")


def _not_awaited(call: Pending[Any]) -> str:
    where = "" if call.line is None else f" on line {call.line}"
    return f"run.{call.name}{where} is not awaited; write `await run.{call.name}`"


def _close(given: object) -> None:
    if inspect.iscoroutine(given):
        given.close()  # Python warns about coroutines that never started


def _kind(given: object) -> str:
    if inspect.iscoroutine(given):
        return f"the coroutine {given.__name__}(...)"
    return "None" if given is None else f"a value of type {type(given).__name__}"


def refuse_nonfinite(batch: DataProto, name: str, step: int) -> None:
    """Reject a column (which the flow may have created) if it contains NaN or infinite values.

    Raises:
        FlowError: the column contains such values; the message names the column, the step and the
            rows.
    """
    column = batch[name]
    values = column.values if isinstance(column, Jagged) else column
    bad = ~np.isfinite(values)
    if not bad.any():
        return
    rows = np.flatnonzero(bad)
    if isinstance(column, Jagged):
        rows = np.unique(np.searchsorted(column.offsets, rows, side="right") - 1)
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    raise FlowError(
        f"step {step}: the flow set the column {name} to a non-finite value in row "
        f"{', '.join(map(str, rows[:5].tolist()))}{more} of {len(batch)}"
    )


_METRIC = re.compile(r"[A-Za-z0-9_]+(?:[./-][A-Za-z0-9_]+)*")


class FollowedRun(Noting, Protocol):
    """The run that the API object delegates to (`trainer.run.FlowRun`)."""

    is_tracing: bool
    options: Any
    metrics: dict[str, float]

    @property
    def parts(self) -> Mapping[str, object]:
        """The run's state for each additional policy, keyed by policy name."""

    @property
    def state(self) -> dict[str, Any]:
        """The flow's saved values."""

    def role(self, name: str) -> Any:
        """Return a role that the flow has declared."""

    def open_step(self, what: str) -> int:
        """Return the number of the open step. `what` is the call's name in error messages."""

    async def next_step(self, steps: AsyncIterator[int]) -> int:
        """End the open step and begin the next one."""

    async def take_samples(self, step: int, greedy: bool) -> DataProto:
        """Return the step's samples."""

    def add_advantages(self, batch: DataProto, of: str) -> DataProto:
        """Return the batch with advantages."""

    async def bring_to_engines(self, step: int) -> None:
        """Send the policy's weights to the engines."""


class FlowApi:
    """Implementation of `flows.base.Run`."""

    __slots__ = ("_run",)
    _run: FollowedRun

    def __init__(self, run: FollowedRun) -> None:
        object.__setattr__(self, "_run", run)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        key = "" if name == "state" else f"[{name!r}]"
        raise FlowError(
            f"run.{name} cannot be set: after a failure the flow restarts with a new run object; "
            f"store values that must survive in run.state{key or '[name]'}, and all others in "
            "variables"
        )

    def __getattr__(self, name: str) -> Any:
        """Look up a role (`flows.base.ROLES`) or an additional policy by name."""
        if name not in ROLES and name not in self._run.parts:
            raise AttributeError(f"the run has no {name!r}", name=name, obj=self)
        return self._run.role(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *ROLES, *self._run.parts]

    @property
    def state(self) -> dict[str, Any]:
        """Values stored by the flow, which are saved in checkpoints."""
        return self._run.state

    @property
    def options(self) -> Any:
        """The flow's options, from `algorithm.flow_options`."""
        return self._run.options

    @property
    def is_tracing(self) -> bool:
        """True during the check with synthetic rows (`trainer.flow_check`)."""
        return self._run.is_tracing

    def steps(self) -> Steps:
        """Return an async iterator over the numbers of the remaining steps."""
        return Steps(self._run)

    def samples(self, *, greedy: bool = False) -> Awaitable[DataProto]:
        """Return the step's samples. From this call until the sync, device memory is reserved for
        the policy.
        """
        run = self._run
        step = run.open_step("samples()")
        return Pending(run, "samples()", lambda: run.take_samples(step, greedy))

    def all(self, *calls: Awaitable[DataProto]) -> Awaitable[DataProto]:
        """Return the batch passed to the calls, with the columns that they add."""
        run = self._run
        run.open_step("all(...)")
        found = checked_calls(calls)
        return Pending(run, "all(...)", lambda: found[0].run.merged(found))

    def advantages(self, batch: DataProto, of: str = "scores") -> DataProto:
        """Return the batch with advantages computed from a column [B].

        Raises:
            LogprobMismatchError: the log-probs of engines and trainer differ by more than the
                bound.
        """
        given = checked_batch(batch, "advantages")
        if of not in CRITICS:
            raise FlowError(
                f"advantages(batch, of={of!r}): of must be {' or '.join(map(repr, CRITICS))}"
            )
        with self._run.calling():
            return self._run.add_advantages(given, of)

    def leave_out(self, batch: DataProto, rows: np.ndarray) -> DataProto:
        """Return the batch with the response mask cleared for `rows` [B] bool."""
        given = checked_batch(batch, "leave_out")
        chosen = np.asarray(rows)
        if chosen.dtype != bool or chosen.shape != (len(given),):
            raise FlowError(
                f"leave_out(batch, rows): rows must contain one bool for each of the {len(given)} "
                "rows, "
                f"got {chosen.dtype} {list(chosen.shape)}"
            )
        return without_rows(given, chosen)

    def later(self, update: Awaitable[None]) -> None:
        """Let a critic's update continue after the step has ended."""
        critics = [f"{name}.update(batch)" for name in CRITICS.values()]
        if not isinstance(update, Updating) or update.name not in critics:
            raise FlowError(
                f"later(...): expected an update of a critic: run.{' or run.'.join(critics)}"
            )
        update.take()

    def sync(self) -> Awaitable[None]:
        """Send the weights of updated policies to their engines, if these engines will be used for
        sampling or validation.
        """
        run = self._run
        step = run.open_step("sync()")
        return Pending(run, "sync()", lambda: run.bring_to_engines(step))

    def record(self, **values: float) -> None:
        """Add numbers computed by the flow to this step's metrics, as flow/NAME."""
        step = self._run.open_step("record(...)")
        for name, value in values.items():
            if not _METRIC.fullmatch(name):
                raise FlowError(
                    f"record(...): {name!r} is not a valid metric name; use letters and _"
                )
            number = _number(value)
            if number is None or not np.isfinite(number):
                raise FlowError(
                    f"step {step}: record({name}=...) must be a finite number, got {value!r:.80}"
                )
            self._run.metrics[f"flow/{name}"] = number


def _number(value: object) -> float | None:
    """Return a number, or an array or tensor with one element, as a float; None for anything
    else."""
    if isinstance(value, numbers.Real):
        return float(value)
    try:
        return float(np.asarray(value).astype(np.float64, casting="same_kind").item())
    except (TypeError, ValueError, RuntimeError):
        return None


class Steps(AsyncIterator[int]):
    """An async iterator over step numbers. Not a generator, because an abandoned generator is
    finalized only by garbage collection.
    """

    def __init__(self, run: FollowedRun) -> None:
        self._run = run

    async def __anext__(self) -> int:
        with self._run.calling():
            return await self._run.next_step(self)

    def __iter__(self) -> NoReturn:
        raise FlowError("steps() is an async iterator; write `async for step in run.steps():`")
