"""Calls that are under way: what becomes of their results, and which of several has ended first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from hybridflow.single_controller.future import waiting

T = TypeVar("T")
_LOOK_S = 1.0  # how often all calls are looked at while none of them is heard of


class Call(Protocol):
    """A call on the ranks of a group: a `Future`, or something that stands for one."""

    def result(self) -> Any:
        """The collected value; waits for it, and raises what `Future.result` raises."""

    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""

    @property
    def open_refs(self) -> list[Any]:
        """Ray's references to the answers that have not been looked at."""

    @property
    def ended_at(self) -> float | None:
        """`time.perf_counter` at the last answer; None where it is not known."""

    def note_end(self) -> None:
        """Have the time of the last answer noted while nobody waits for it."""


class Ended:
    """A call that has ended with this value."""

    def __init__(self, value: Any) -> None:
        self._value, self.ended_at, self.open_refs = value, time.perf_counter(), list[Any]()

    def result(self) -> Any:
        """The value."""
        return self._value

    def done(self) -> bool:
        """Return True."""
        return True

    def note_end(self) -> None:
        """Do nothing: the end is known."""


class Pending(Generic[T]):
    """One call or several, and what is made of their results."""

    def __init__(self, calls: Sequence[Call], make: Callable[[list[Any]], T]) -> None:
        self._calls, self._make = calls, make

    def result(self) -> T:
        """What is made of the results; waits for them.

        Raises:
            HybridFlowError: what `Future.result` raises.
        """
        return self._make([call.result() for call in self._calls])

    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return all(call.done() for call in self._calls)

    @property
    def open_refs(self) -> list[Any]:
        """Ray's references to the answers that have not been looked at."""
        return [ref for call in self._calls for ref in call.open_refs]

    def note_end(self) -> None:
        """Have the end of each call noted while nobody waits for it."""
        for call in self._calls:
            call.note_end()

    @property
    def ended_at(self) -> float | None:
        """`time.perf_counter` as the last call ended; None where it is not known."""
        times = [call.ended_at for call in self._calls]
        known = [at for at in times if at is not None]
        return max(known) if known and len(known) == len(times) else None


@waiting()
def first_done(pending: Sequence[Pending[Any]]) -> int:
    """The number of one that has ended or failed; waits until there is one. Failures of all of them are noticed
    meanwhile, and the deadlines of their calls count."""
    while True:
        for number, one in enumerate(pending):
            if one.done():
                return number
        import ray  # here, so that calls without ranks need none

        refs = [ref for one in pending for ref in one.open_refs]
        ray.wait(refs, num_returns=1, timeout=_LOOK_S)
