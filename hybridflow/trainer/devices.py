"""One queue of role calls per device pool: a call starts as soon as its role's devices are free.

Roles that share devices run one after another, in call order; roles on other devices run
concurrently. This is the asynchronous execution of the HybridFlow paper (arXiv 2409.19256, section
4): the loop defines the data dependencies, and the placement determines what runs in parallel.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hybridflow.observe.timeline import Timeline

T = TypeVar("T")


class Devices:
    """The device pools, and the calls that occupy them or wait for them.

    Args:
        pool_of: returns the device pool of a role.
    """

    def __init__(self, pool_of: Callable[[str], str], timeline: Timeline) -> None:
        self._pool_of = pool_of
        self._timeline = timeline
        # locks are acquired in call order
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._calls: dict[asyncio.Task[Any], str] = {}  # unfinished calls and their pools
        self._first_error: Exception | None = None  # raised once by `finish`

    def call(
        self, role: str, phase: str, step: int, work: Coroutine[Any, Any, T]
    ) -> asyncio.Task[T]:
        """Wait for the role's devices, then run `work` and record it as the step's `phase`."""
        pool = self._pool_of(role)
        call = asyncio.ensure_future(self._in_turn(pool, phase, step, work))
        self._calls[call] = pool

        def note_end(_: asyncio.Task[T]) -> None:
            del self._calls[call]
            # avoid Python's warnings about coroutines that never started and exceptions never
            # retrieved
            work.close()
            if not call.cancelled():
                call.exception()

        call.add_done_callback(note_end)
        return call

    async def result(self, call: asyncio.Task[T]) -> T:
        """Wait for a call and return its result. Raises the same errors as `finish`."""
        await self.finish(call)
        return call.result()

    async def finish(self, *wanted: asyncio.Task[Any]) -> None:
        """Wait until these calls have finished. Other calls keep running.

        Raises:
            HybridFlowError: the error of the first call that failed, even if it is not one of
                these; raised once.
        """
        while self._first_error is None and not all(call.done() for call in wanted):
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
        error = self._first_error
        self._first_error = None
        if error is not None:
            raise error

    async def finish_pool(self, role: str) -> None:
        """Wait until the role's devices are free."""
        pool = self._pool_of(role)
        await self.finish(*[call for call, of_pool in self._calls.items() if of_pool == pool])

    def is_busy(self, role: str) -> bool:
        """Return True if a call occupies the role's devices."""
        return self._locks[self._pool_of(role)].locked()

    async def forget(self) -> None:
        """Cancel all calls, and return once none is pending on the driver. Ranks may still be busy.
        Ranks of restarted groups are killed, and other ranks finish their current work before
        starting later calls.
        """
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
