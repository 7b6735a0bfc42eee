"""Calls of the roles, each begun as soon as the devices of its role are free.

Roles that share devices work one after another, in the order in which they are called; roles on
other devices work at the same time. This is the asynchronous execution of the HybridFlow paper
(arXiv 2409.19256, section 4): the loop says what is computed of what, the placement says what of it
happens at once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hybridflow.observe.timeline import Timeline

T = TypeVar("T")


class Devices:
    """The pools of devices, and the calls that hold them or wait for them.

    Args:
        pool_of: the pool of devices of a role.
    """

    def __init__(self, pool_of: Callable[[str], str], timeline: Timeline) -> None:
        self._pool_of = pool_of
        self._timeline = timeline
        # a lock is given in the order of asking
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._calls: dict[asyncio.Task[Any], str] = {}  # that have not ended, with their pools
        self._first_error: Exception | None = None  # until somebody is told

    def call(
        self, role: str, phase: str, step: int, work: Coroutine[Any, Any, T]
    ) -> asyncio.Task[T]:
        """Run `work` when the devices of the role are free, as this phase of the step."""
        pool = self._pool_of(role)
        call = asyncio.ensure_future(self._in_turn(pool, phase, step, work))
        self._calls[call] = pool

        def note_end(_: asyncio.Task[T]) -> None:
            del self._calls[call]
            # Python warns of a coroutine that never began, and of an exception that nobody
            # retrieved
            work.close()
            if not call.cancelled():
                call.exception()

        call.add_done_callback(note_end)
        return call

    async def result(self, call: asyncio.Task[T]) -> T:
        """The result of a call; see `finish`."""
        await self.finish(call)
        return call.result()

    async def finish(self, *wanted: asyncio.Task[Any]) -> None:
        """Wait until these calls have ended. Others go on.

        Raises:
            HybridFlowError: of the call that failed first, whichever it was; once.
        """
        while self._first_error is None and not all(call.done() for call in wanted):
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
        error = self._first_error
        self._first_error = None
        if error is not None:
            raise error

    async def finish_pool(self, role: str) -> None:
        """Wait until the devices of the role are free."""
        pool = self._pool_of(role)
        await self.finish(*[call for call, of_pool in self._calls.items() if of_pool == pool])

    def is_busy(self, role: str) -> bool:
        """Return whether a call holds the devices of the role."""
        return self._locks[self._pool_of(role)].locked()

    async def forget(self) -> None:
        """Drop all calls; none goes on when this returns. Their ranks may still be at work: those
        of groups that start again are killed, and others begin what they are called for later when
        they have ended this."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._first_error = None

    async def _in_turn(self, pool: str, phase: str, step: int, work: Coroutine[Any, Any, T]) -> T:
        error = ""
        async with self._locks[pool]:
            span = self._timeline.begin(phase, step)
            try:
                return await work
            except BaseException as raised:
                error = type(raised).__name__
                if self._first_error is None and isinstance(raised, Exception):
                    self._first_error = raised
                raise
            finally:
                span.end(error=error)
