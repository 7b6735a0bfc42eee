"""What is computed of a step's samples before their advantages, by the policy and the other roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.single_controller import Pending
from hybridflow.trainer.calls import Asked, Calls
from hybridflow.trainer.protocols import Policy, Role
from hybridflow.workers.model_role import ModelWorker, teacher_method
from hybridflow.workers.policy import PolicyWorker


class Passes:
    """Asks all roles that have something to compute; those with devices of their own do it at the same time.

    Args:
        others: critic, reward_model, teacher and a reference in processes of its own, as far as the run has them.
        scores: whether the reward model is asked; the samples of a dump have its scores, and pairs need none.
    """

    def __init__(
        self, config: RunConfig, calls: Calls, policy: Policy, others: Mapping[str, Role], *, scores: bool
    ) -> None:
        self.config, self.calls, self.policy = config, calls, policy
        self.reward_model = others.get("reward_model") if scores else None
        self.critic, self.reference, self.teacher = (others.get(name) for name in ("critic", "reference", "teacher"))

    def with_model_scores(self, batch: DataProto, step: int) -> DataProto:
        """Adds rm_scores [B] where there is a reward model."""
        asked = self._model_scores(batch, step)
        self.calls.finish(*asked)
        return _with_found(batch, asked)

    def before_advantages(
        self, batch: DataProto, step: int, seed: int, scores_first: bool
    ) -> tuple[DataProto, DataProto | None]:
        """Adds rm_scores, old_log_probs, ref_log_probs where a KL term needs them, what a teacher says, values, and
        sum_pi_squared where the estimator reads it.

        Args:
            seed: of the step's mini-batches.
            scores_first: whether a pass computes old_log_probs of all rows. Otherwise the first update reports those of
                its rows, and where updates follow it a pass computes those of their rows, which are returned apart.
        """
        config, policy, later = self.config, self.policy, None
        asked = self._model_scores(batch, step)
        if scores_first:
            first = self.calls.ask("actor", "old_log_prob", step, partial(policy.begin_log_probs, batch))
            asked.append(first)
            if derived.needs_sum_pi_squared(config):

                def begin() -> Pending[DataProto]:
                    return policy.begin(PolicyWorker.compute_sum_pi_squared, batch.union(first.value))

                asked.append(self.calls.ask("actor", "sum_pi_squared", step, begin))
        elif derived.scores_later_rows(config):
            later = self.calls.ask("actor", "old_log_prob", step, partial(policy.begin_later_log_probs, batch, seed))
        if derived.needs_reference(config):
            holder, worker = (self.reference, ModelWorker) if self.reference else (policy, PolicyWorker)
            asked.append(
                self.calls.ask("reference", "ref", step, partial(holder.begin, worker.compute_ref_log_probs, batch))
            )
        if self.teacher:
            reading = teacher_method(config.actor.distillation)
            asked.append(self.calls.ask("teacher", "teacher", step, partial(self.teacher.begin, reading, batch)))
        if self.critic:
            values = partial(self.critic.begin, ModelWorker.compute_values, batch)
            asked.append(self.calls.ask("critic", "values", step, values))
        self.calls.finish(*asked, *([later] if later else []))
        return _with_found(batch, asked), later.value if later else None

    def _model_scores(self, batch: DataProto, step: int) -> list[Asked[DataProto]]:
        if self.reward_model is None:
            return []
        begin = partial(self.reward_model.begin, ModelWorker.compute_scores, batch)
        return [self.calls.ask("reward_model", "reward_model", step, begin)]


def _with_found(batch: DataProto, asked: Sequence[Asked[DataProto]]) -> DataProto:
    """The batch with the columns that these passes found."""
    return reduce(DataProto.union, (one.value for one in asked), batch)
