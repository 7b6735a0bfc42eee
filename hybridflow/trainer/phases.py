"""Ownership of device memory: it belongs to the policy during training and to the engines during
generation, and is shared during a weight sync.

Engines may generate whenever none of the phases below is active. If nothing is offloaded and
engines keep their memory, a phase does nothing.
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
