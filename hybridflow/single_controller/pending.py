"""Calls in flight: combining their results, and finding the first of several to finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from hybridflow.single_controller.future import waiting

T = TypeVar("T")
_LOOK_S = 1.0  # interval at which all calls are checked while none of them replies


class Call(Protocol):
    """A call on the ranks of a group: a `Future` or an object with the same interface."""

    def result(self) -> Any:
        """Wait for the call and return the collected value. Raises the same errors as `Future.result`."""

    def done(self) -> bool:
        """Return whether `result` would return or raise immediately."""

    @property
    def open_refs(self) -> list[Any]:
        """Ray references of the replies that have not been received."""

    @property
    def ended_at(self) -> float | None:
        """`time.perf_counter` at the last reply; None if unknown."""

    def note_end(self) -> None:
        """Record the time of the last reply even if nothing waits for it."""


class Ended:
    """A finished call with a known value."""

    def __init__(self, value: Any) -> None:
        self._value, self.ended_at, self.open_refs = value, time.perf_counter(), list[Any]()

    def result(self) -> Any:
        """Return the value."""
        return self._value

    def done(self) -> bool:
        """Return True."""
        return True

    def note_end(self) -> None:
        """Do nothing: the time is already known."""


class Pending(Generic[T]):
    """One or more calls in flight, and the function that combines their results."""

    def __init__(self, calls: Sequence[Call], make: Callable[[list[Any]], T]) -> None:
        self._calls, self._make = calls, make

    def result(self) -> T:
        """Wait for all calls and return the combined result.

        Raises:
            HybridFlowError: as raised by `Future.result`.
        """
        return self._make([call.result() for call in self._calls])

    def done(self) -> bool:
        """Return whether `result` would return or raise immediately."""
        return all(call.done() for call in self._calls)

    @property
    def open_refs(self) -> list[Any]:
        """Ray references of the replies that have not been received."""
        return [ref for call in self._calls for ref in call.open_refs]

    def note_end(self) -> None:
        """Record the end of each call even if nothing waits for it."""
        for call in self._calls:
            call.note_end()

    @property
    def ended_at(self) -> float | None:
        """`time.perf_counter` at the end of the last call; None if unknown."""
        times = [call.ended_at for call in self._calls]
        known = [at for at in times if at is not None]
        return max(known) if known and len(known) == len(times) else None


@waiting()
def first_done(pending: Sequence[Pending[Any]]) -> int:
    """Wait until one of `pending` has finished or failed, and return its index.

    While waiting, failures of all calls are detected and their timeouts apply.
    """
    while True:
        for number, one in enumerate(pending):
            if one.done():
                return number
        import ray  # imported here, so that calls without ranks do not need ray

        refs = [ref for one in pending for ref in one.open_refs]
        ray.wait(refs, num_returns=1, timeout=_LOOK_S)
