"""What is computed of a step's samples before their advantages, by the policy and the other
roles."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.trainer.devices import Devices
from hybridflow.trainer.protocols import Policy, Role
from hybridflow.workers.model_role import ModelWorker, teacher_method
from hybridflow.workers.policy import PolicyWorker


class Passes:
    """Calls all roles that have something to compute; those with devices of their own do it at the
    same time.

    Args:
        others: critic, reward_model, teacher and a reference in processes of its own, as far as the
            run has them.
    """

    def __init__(
        self, config: RunConfig, devices: Devices, policy: Policy, others: Mapping[str, Role]
    ) -> None:
        self.config = config
        self.devices = devices
        self.policy = policy
        # the samples of a dump have its scores, and pairs need none
        scores = config.trainer.rollouts_from is None and config.data.answers != "pairs"
        self.reward_model = others.get("reward_model") if scores else None
        self.critic, self.reference, self.teacher = (
            others.get(name) for name in ("critic", "reference", "teacher")
        )

    async def with_model_scores(self, batch: DataProto, step: int) -> DataProto:
        """Adds rm_scores [B] where there is a reward model."""
        calls = self._model_scores(batch, step)
        await self.devices.finish(*calls)
        return _with_results(batch, calls)

    async def before_advantages(
        self, batch: DataProto, step: int, seed: int, scores_first: bool
    ) -> tuple[DataProto, DataProto | None]:
        """Adds rm_scores, old_log_probs, ref_log_probs where a KL term needs them, what a teacher
        says, values, and sum_pi_squared where the estimator reads it.

        Args:
            seed: of the step's mini-batches.
            scores_first: whether a pass computes old_log_probs of all rows. Otherwise the first
                update reports those of its rows, and where updates follow it a pass computes those
                of their rows, which are returned apart.
        """
        config = self.config
        policy = self.policy
        call = self.devices.call
        calls = self._model_scores(batch, step)
        later: asyncio.Task[DataProto] | None = None
        if scores_first:
            log_probs = call("actor", "old_log_prob", step, policy.log_probs(batch))
            calls.append(log_probs)
            if derived.needs_sum_pi_squared(config):
                calls.append(
                    call("actor", "sum_pi_squared", step, self._sum_pi_squared(batch, log_probs))
                )
        elif derived.scores_later_rows(config):
            later = call("actor", "old_log_prob", step, policy.later_log_probs(batch, seed))
        if derived.needs_reference(config):
            if self.reference:
                ref_log_probs = self.reference.compute(ModelWorker.compute_ref_log_probs, batch)
            else:
                ref_log_probs = policy.compute(PolicyWorker.compute_ref_log_probs, batch)
            calls.append(call("reference", "ref", step, ref_log_probs))
        if self.teacher:
            reading = self.teacher.compute(teacher_method(config.actor.distillation), batch)
            calls.append(call("teacher", "teacher", step, reading))
        if self.critic:
            calls.append(
                call(
                    "critic", "values", step, self.critic.compute(ModelWorker.compute_values, batch)
                )
            )
        await self.devices.finish(*calls, *([later] if later else []))
        return _with_results(batch, calls), later.result() if later else None

    def _model_scores(self, batch: DataProto, step: int) -> list[asyncio.Task[DataProto]]:
        if self.reward_model is None:
            return []
        scores = self.reward_model.compute(ModelWorker.compute_scores, batch)
        return [self.devices.call("reward_model", "reward_model", step, scores)]

    async def _sum_pi_squared(
        self, batch: DataProto, log_probs: asyncio.Task[DataProto]
    ) -> DataProto:
        return await self.policy.compute(
            PolicyWorker.compute_sum_pi_squared, batch.union(await log_probs)
        )


def _with_results(batch: DataProto, calls: Sequence[asyncio.Task[DataProto]]) -> DataProto:
    """The batch with the columns of calls that have ended."""
    for call in calls:
        batch = batch.union(call.result())
    return batch
