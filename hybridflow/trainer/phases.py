"""Who holds the devices' memory when: the policy while it trains, the engines while they generate, both while weights
travel.

Between the phases below the engines may answer. With nothing to offload and engines that stay, each phase is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from hybridflow.config.schema import RunConfig
from hybridflow.device.residency import PARTS
from hybridflow.rollout.protocols import RolloutService
from hybridflow.trainer.protocols import Sleeper, TrainGroup


class Phases:
    """The order in which memory changes hands, at one place: never both the engines' cache and the optimizer."""

    def __init__(
        self,
        config: RunConfig,
        policy: TrainGroup,
        engines: RolloutService,
        beside: Mapping[str, Sleeper] | None = None,
    ) -> None:
        """Args:
        beside: the roles besides the policy, by their section of the configuration.
        """
        self.policy, self.engines = policy, engines
        self._sleepers = [
            group for role, group in (beside or {}).items() if any(asdict(getattr(config, role).offload).values())
        ]
        offload = config.actor.offload
        self._policy_sleeps = offload.weights or offload.gradients or offload.optimizer
        self._engines_sleep = config.rollout.sleep_while_training
        self._engines_asleep = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """The engines give their memory away; the policy's weights stay on the device over several passes."""
        if self._engines_sleep:
            self.engines.sleep()
            self._engines_asleep = True
        if self._policy_sleeps:
            self.policy.wake(("weights",))
        yield
        if self._policy_sleeps:
            self.policy.sleep(("gradients", "optimizer", "reference"))

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Weights on both sides; then the policy leaves, and only then the engines take their cache again.

        The other roles are gone by then: their methods bring in what they need and take it off again. What is awake has
        just been started, or started again.
        """
        for role in self._sleepers:
            role.sleep(PARTS)
        if self._policy_sleeps:
            self.policy.sleep(("gradients", "optimizer", "reference"))
        if self._engines_asleep:
            self.engines.wake(("weights",))
        yield
        if self._policy_sleeps:
            self.policy.sleep(("weights",))
        if self._engines_asleep:
            self.engines.wake(("kv_cache",))
            self._engines_asleep = False
