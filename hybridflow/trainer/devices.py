"""Calls of the roles, each begun as soon as the devices of its role are free.

Roles that share devices work one after another, in the order in which they are called; roles on other devices work at
the same time. This is the asynchronous execution of the HybridFlow paper (arXiv 2409.19256, section 4): the loop says
what is computed of what, the placement says what of it happens at once.
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
        self._pool_of, self._timeline = pool_of, timeline
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # a lock is given in the order of asking
        self._calls: dict[asyncio.Task[Any], str] = {}  # that have not ended well, with their pools

    def call(self, role: str, phase: str, step: int, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` when the devices of the role are free, as this phase of the step."""
        pool = self._pool_of(role)
        call = asyncio.ensure_future(self._in_turn(pool, phase, step, work))
        self._calls[call] = pool
        return call

    async def result(self, call: asyncio.Task[T]) -> T:
        """The result of a call; see `finish`."""
        await self.finish(call)
        return call.result()

    async def finish(self, *wanted: asyncio.Task[Any]) -> None:
        """Wait until these calls have ended. Others go on.

        Raises:
            HybridFlowError: of the first call that failed, whichever it was.
        """
        while not all(call.done() for call in wanted):
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
            self._forget_ended()
        self._forget_ended()

    async def finish_pool(self, role: str) -> None:
        """Wait until the devices of the role are free."""
        pool = self._pool_of(role)
        await self.finish(*[call for call, of_pool in self._calls.items() if of_pool == pool])

    def is_busy(self, role: str) -> bool:
        """Return whether a call holds the devices of the role."""
        return self._turns[self._pool_of(role)].locked()

    def forget(self) -> None:
        """Cancel what was called: the ranks have been lost."""
        for call in self._calls:
            call.cancel()
        self._turns.clear()
        self._calls = {}

    def _forget_ended(self) -> None:
        for call in [call for call in self._calls if call.done()]:
            del self._calls[call]
            call.result()  # raises what it failed with

    async def _in_turn(self, pool: str, phase: str, step: int, work: Coroutine[Any, Any, T]) -> T:
        error = ""
        try:
            async with self._turns[pool]:
                span = self._timeline.begin(phase, step)
                try:
                    return await work
                except BaseException as raised:
                    error = type(raised).__name__
                    raise
                finally:
                    span.end(error=error)
        finally:
            work.close()  # Python warns of a coroutine that never began
