"""The devices of a run: one queue of role calls per device pool, and the ownership of device memory
in each phase of a step.

A call starts as soon as its role's devices are free. Roles that share devices run one after
another, in call order; roles on other devices run concurrently. This is the asynchronous execution
of the HybridFlow paper (arXiv 2409.19256, section 4): the loop defines the data dependencies, and
the placement determines what runs in parallel.

Device memory belongs to the policy during training and to the engines during generation, and is
shared during a weight sync. Engines may generate whenever none of the phases is active. If nothing
is offloaded and engines keep their memory, a phase does nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.device.residency import PARTS
from hybridflow.observe.timeline import Timeline
from hybridflow.rollout.protocols import Rollouts
from hybridflow.trainer.protocols import Role
from hybridflow.workers.role import RoleWorker

T = TypeVar("T")


class Devices:
    """The device pools, and the calls that occupy them or wait for them.

    Args:
        pool_of: returns the device pool of a role.
    """

    def __init__(self, pool_of: Callable[[str], str], timeline: Timeline) -> None:
        self._pool_of = functools.cache(pool_of)  # a placement does not change
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


class Phases:
    """Transfers device memory between the policy and the engines, ordered so that the engines'
    cache and the optimizer are never on the devices at the same time."""

    def __init__(
        self,
        config: RunConfig,
        policy: Role,
        engines: Rollouts,
        others: Mapping[str, Role] | None = None,
        is_busy: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Args:
        others: the roles other than the policy, keyed by configuration section.
        is_busy: returns True if a role's devices are in use.
        """
        self.policy = policy
        self.engines = engines
        self._is_busy = is_busy
        self._offloaded = {
            name: role
            for name, role in (others or {}).items()
            if any(asdict(getattr(config, name).offload).values())
        }
        offload = config.actor.offload
        self._policy_sleeps = offload.weights or offload.gradients or offload.optimizer
        self._engines_sleep = config.rollout.sleep_while_training
        self._engines_asleep = derived.alternates(config)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Release the engines' memory, and keep the policy's weights on the device until the block
        ends, so that they are loaded only once for several passes.
        """
        if self._engines_sleep:
            await self.engines.sleep()
            self._engines_asleep = True
        if self._policy_sleeps:
            await self.policy.call(RoleWorker.wake, ("weights",))
        yield
        if self._policy_sleeps:
            await self.policy.call(RoleWorker.sleep, ("gradients", "optimizer", "reference"))

    async def make_room(self) -> None:
        """Offload everything except the policy's weights.

        Other roles are normally offloaded already, because their methods load and offload the parts
        that they need. Only a role that has just started or restarted is still on the device. A
        busy role does not share devices with the policy, so it is skipped.
        """
        for name, role in self._offloaded.items():
            if not self._is_busy(name):
                await role.call(RoleWorker.sleep, PARTS)
        if self._policy_sleeps:
            await self.policy.call(RoleWorker.sleep, ("gradients", "optimizer", "reference"))

    @asynccontextmanager
    async def sync(self) -> AsyncIterator[None]:
        """Load the weights of the policy and the engines. Afterwards, offload the policy's weights,
        and only then have the engines reallocate their cache.
        """
        await self.make_room()
        if self._engines_asleep:
            await self.engines.wake(("weights",))
        yield
        if self._policy_sleeps:
            await self.policy.call(RoleWorker.sleep, ("weights",))
        if self._engines_asleep:
            await self.engines.wake(("kv_cache",))
            self._engines_asleep = False
