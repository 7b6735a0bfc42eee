"""The calls that a flow makes and awaits, and the check of the batches that it passes to them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.errors import FlowError

T = TypeVar("T")


class Noting(Protocol):
    """The run, as far as its calls use it."""

    def line(self) -> int | None:
        """The line of the flow's file that is being executed; None outside of it."""

    def note(self, call: Pending[Any]) -> None:
        """Keep a call until the end of its step, by when it is awaited."""

    def calling(self) -> AbstractContextManager[None]:
        """The time inside is the run's, and not the flow's own."""

    async def merged(self, calls: Sequence[Call]) -> DataProto:
        """The batch of the calls with the columns of all of them."""


class Pending(Generic[T]):
    """A call of a flow. It is awaited once, in its step.

    Attributes:
        name: how the flow writes it after `run.`, for messages.
        line: of the flow's file.
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
        """Mark the call as awaited.

        Raises:
            FlowError: it was awaited before.
        """
        if self.is_awaited:
            raise FlowError(
                f"run.{self.name} of line {self.line} is awaited twice; make the call again, or "
                "keep its result in a variable"
            )
        self.is_awaited = True


class Call(Pending[DataProto]):
    """A call over a batch. Its result is the batch with the columns that the call writes.

    Args:
        tasks: write columns. others: are waited for as well.
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
    """The batch of the calls with the columns of all of them, when `finish` (`Devices.finish`) has
    waited for their tasks."""
    await finish(*[task for one in calls for task in (*one.tasks, *one.others)])
    batch = calls[0].batch
    for call in calls:
        for task in call.tasks:
            batch = batch.union(task.result())
    return batch


class Updating(Pending[None]):
    """The updates of a role in a step. They have ended when the call was awaited."""


def checked_calls(given: Sequence[object]) -> list[Call]:
    """The calls that `run.all(...)` joins.

    Raises:
        FlowError: they are not passes over one batch.
    """
    if not given:
        raise FlowError("all(...) takes calls of roles over a batch, at least one")
    calls = list[Call]()
    for one in given:
        if not isinstance(one, Call):
            raise FlowError(f"all(...) takes calls of roles over a batch, and {_other(one)}")
        if calls and one.batch is not calls[0].batch:
            raise FlowError(
                f"all(...) takes calls over one batch, and {one.name} is over another one than "
                f"{calls[0].name}: its columns would be lost. Make the batch first, and all calls "
                "of it, or await them one after another"
            )
        calls.append(one)
    for call in calls:
        call.take()
    return calls


def _other(given: object) -> str:
    """What `run.all` was given in the place of a pass, with what to write."""
    if isinstance(given, Updating):
        return (
            f"{given.name} adds no column; write `await run.{given.name}` on a line of its own "
            "(an update of the critic may go to run.later)"
        )
    if isinstance(given, Pending):
        return f"{given.name} is none; write `await run.{given.name}` on a line of its own"
    if isinstance(given, DataProto):
        return "was given a batch: leave `await` out before the calls within all(...)"
    if isinstance(given, list | tuple):
        return "was given a list of them; write run.all(*calls)"
    _close(given)
    return f"was given {_kind(given)}"


def checked_batch(given: object, call: str) -> DataProto:
    """What was passed to `run.CALL(batch)`.

    Raises:
        FlowError: it is no batch; says what is missing.
    """
    if isinstance(given, DataProto):
        return given
    if isinstance(given, Pending):
        raise FlowError(f"{call}(batch) was given a call: {_not_awaited(given)}")
    _close(given)
    hint = ""
    if inspect.isawaitable(given):
        hint = ", which is not awaited: write `await` before its call"
    elif isinstance(given, list | tuple):
        hint = "; run.all(...) joins calls to one batch"
    elif given is None:
        hint = "; has a function forgotten to return it?"
    elif callable(given):
        hint = ", which is not called: write `()` behind it"
    raise FlowError(f"{call}(batch) takes a batch, and was given {_kind(given)}{hint}")


def _not_awaited(call: Pending[Any]) -> str:
    where = "" if call.line is None else f" in line {call.line}"
    return f"run.{call.name}{where} is not awaited; write `await run.{call.name}`"


def _close(given: object) -> None:
    if inspect.iscoroutine(given):
        given.close()  # Python reports one that never began


def _kind(given: object) -> str:
    if inspect.iscoroutine(given):
        return f"the coroutine {given.__name__}(...)"
    return "None" if given is None else f"a value of type {type(given).__name__}"


def refuse_nonfinite(batch: DataProto, name: str, step: int) -> None:
    """Refuse a column that the flow may have made and that has NaN or infinite numbers.

    Raises:
        FlowError: names the column, the step and the rows.
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
        f"step {step}: the column {name} is not finite in row "
        f"{', '.join(map(str, rows[:5].tolist()))}{more} of {len(batch)}: the flow has made it so"
    )
