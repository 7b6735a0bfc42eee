"""Ownership of the devices' memory: the policy's while it trains, the engines' while they generate,
shared during a weight sync.

Between the phases below the engines may answer. Where nothing is offloaded and engines keep their
memory, a phase does nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.device.residency import PARTS
from hybridflow.rollout.protocols import Rollouts
from hybridflow.trainer.protocols import Role
from hybridflow.workers.role import RoleWorker


class Phases:
    """The order in which memory changes hands: the engines' cache and the optimizer never share the
    devices."""

    def __init__(
        self,
        config: RunConfig,
        policy: Role,
        engines: Rollouts,
        others: Mapping[str, Role] | None = None,
        is_busy: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Args:
        others: the roles besides the policy, by their section of the configuration.
        is_busy: whether the devices of one of them are at work.
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
        """The engines release their memory; the policy's weights stay on the device over several
        passes."""
        if self._engines_sleep:
            await self.engines.sleep()
            self._engines_asleep = True
        if self._policy_sleeps:
            await self.policy.call(RoleWorker.wake, ("weights",))
        yield
        if self._policy_sleeps:
            await self.policy.call(RoleWorker.sleep, ("gradients", "optimizer", "reference"))

    async def make_room(self) -> None:
        """Leave the policy's weights alone on the device.

        The other roles are off it by then: their methods bring in what they need and take it off
        again. A role that is not has just been started, or started again. One whose devices are at
        work has others than the policy.
        """
        for name, role in self._offloaded.items():
            if not self._is_busy(name):
                await role.call(RoleWorker.sleep, PARTS)
        if self._policy_sleeps:
            await self.policy.call(RoleWorker.sleep, ("gradients", "optimizer", "reference"))

    @asynccontextmanager
    async def sync(self) -> AsyncIterator[None]:
        """Weights on both sides; then the policy's leave, and only then do the engines allocate
        their cache again."""
        await self.make_room()
        if self._engines_asleep:
            await self.engines.wake(("weights",))
        yield
        if self._policy_sleeps:
            await self.policy.call(RoleWorker.sleep, ("weights",))
        if self._engines_asleep:
            await self.engines.wake(("kv_cache",))
            self._engines_asleep = False
