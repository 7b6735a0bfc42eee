"""Passes of the roles, each begun as soon as the devices of its role are free.

Roles that share devices work one after another, in the order in which they are asked; roles on other devices work at
the same time. This is the asynchronous execution of the HybridFlow paper (arXiv 2409.19256, section 4): the loop says
what is computed of what, the placement says what of it happens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from hybridflow.observe.timeline import Span, Timeline
from hybridflow.single_controller import Pending, first_done

T = TypeVar("T")


@dataclass(eq=False)
class Asked(Generic[T]):
    """A pass that waits for its devices, runs, or has ended.

    Attributes:
        pool: whose devices it needs. step: the step that it belongs to. begin: starts it.
    """

    pool: str
    phase: str
    step: int
    begin: Callable[[], Pending[T]]
    ended: bool = False
    _value: T | None = None

    @property
    def value(self) -> T:
        """What it found, once it has ended."""
        assert self.ended
        return self._value  # type: ignore[return-value]


class _Running(NamedTuple):
    """A pass that has begun."""

    asked: Asked[Any]
    pending: Pending[Any]
    span: Span


class Calls:
    """The passes that were asked for and have not ended.

    Args:
        pool_of: the pool of devices of a role.
    """

    def __init__(self, pool_of: Callable[[str], str], timeline: Timeline) -> None:
        self._pool_of, self._timeline = pool_of, timeline
        self._queue: list[Asked[Any]] = []
        self._running: dict[str, _Running] = {}  # by pool

    def ask(self, role: str, phase: str, step: int, begin: Callable[[], Pending[T]]) -> Asked[T]:
        """Have `begin` called when the devices of the role are free: now, or while `finish` waits."""
        asked = Asked(self._pool_of(role), phase, step, begin)
        self._queue.append(asked)
        self._begin_what_can()
        return asked

    def finish(self, *wanted: Asked[Any]) -> None:
        """Wait until these have ended. Others go on.

        Raises:
            HybridFlowError: of the first pass that failed, whichever it was.
        """
        while not all(one.ended for one in wanted):
            running = list(self._running.values())
            self._end(running[0 if len(running) == 1 else first_done([one.pending for one in running])])
            self._begin_what_can()

    def finish_pool(self, role: str) -> None:
        """Wait until the devices of the role are free."""
        pool = self._pool_of(role)
        begun = [one.asked for one in self._running.values()]
        self.finish(*[one for one in (*begun, *self._queue) if one.pool == pool])

    def is_busy(self, role: str) -> bool:
        """Whether a pass is running on the devices of the role."""
        return self._pool_of(role) in self._running

    def is_over(self, asked: Asked[Any]) -> bool:
        """Whether `finish` would not wait for it."""
        running = self._running.get(asked.pool)
        return asked.ended or (running is not None and running.asked is asked and running.pending.done())

    def forget(self) -> None:
        """Nobody wants what was asked for: the ranks have been lost."""
        self._queue, self._running = [], {}

    def _begin_what_can(self) -> None:
        for one in list(self._queue):
            if one.pool not in self._running:
                self._queue.remove(one)
                span = self._timeline.begin(one.phase, one.step)
                try:
                    pending = one.begin()
                except BaseException as error:
                    span.end(error=type(error).__name__)
                    raise
                self._running[one.pool] = _Running(one, pending, span)
                if one.pool != self._pool_of("actor"):  # the loop waits for the policy, and sees its end itself
                    pending.note_end()

    def _end(self, one: _Running) -> None:
        error = ""
        try:
            one.asked._value = one.pending.result()
            one.asked.ended = True
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            del self._running[one.asked.pool]
            one.span.end(one.pending.ended_at, error)
