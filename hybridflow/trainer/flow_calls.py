"""The calls that a flow makes and awaits, checks of the batches passed to them, and warnings about
a flow whose own code runs or waits for a long time between calls.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.errors import FlowError
from hybridflow.observe.progress import duration

T = TypeVar("T")
_FIRST_S = 60.0  # the interval doubles with each message


class Noting(Protocol):
    """The subset of the run's interface that role calls need."""

    def line(self) -> int | None:
        """Return the line number in the flow's file that is being executed, or None if execution is
        outside that file.
        """

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
        """Mark the call as awaited.

        Raises:
            FlowError: it has already been awaited.
        """
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
    """Wait for the calls' tasks using `finish` (`Devices.finish`), and return the batch passed to
    the calls, with the columns that they add.
    """
    await finish(*[task for one in calls for task in (*one.tasks, *one.others)])
    batch = calls[0].batch
    for call in calls:
        for task in call.tasks:
            batch = batch.union(task.result())
    return batch


class Updating(Pending[None]):
    """A call that runs a role's updates in a step. Awaiting it waits for all of them to finish."""


def checked_calls(given: Sequence[object]) -> list[Call]:
    """Return the calls that `run.all(...)` joins.

    Raises:
        FlowError: they are not all forward passes on the same batch.
    """
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
    """Check that the argument of `run.CALL(batch)` is a batch, and return it.

    Raises:
        FlowError: it is not a batch; the message suggests a fix.
    """
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


class FlowWatch:
    """Measures how long the flow's own code has been running since its last call to the run."""

    def __init__(self) -> None:
        self._calls = 0  # calls in progress
        self._since = time.monotonic()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Attribute the time spent in the block to the run."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._since = time.monotonic()

    def seconds(self) -> float:
        """Return the time in seconds since the last call ended; 0 during a call."""
        return 0.0 if self._calls else time.monotonic() - self._since

    @contextmanager
    def saying(self, say: Callable[[str], None], where: Callable[[], str]) -> Iterator[None]:
        """Report the flow's position, at growing intervals, while it makes no calls. Uses a thread,
        because the flow's code may block the event loop."""
        ended = threading.Event()
        self._since = time.monotonic()

        def watch() -> None:
            limit = _FIRST_S
            while not ended.wait(limit - min(self.seconds(), 0.9 * limit)):
                seconds = self.seconds()
                if seconds < _FIRST_S:
                    limit = _FIRST_S
                elif seconds >= limit:
                    say(f"{where()} for {duration(seconds)} without calling a method of the run")
                    limit = 2 * seconds

        thread = threading.Thread(target=watch, name="flow-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
