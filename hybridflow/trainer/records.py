"""Per-step records: metrics, rollout dumps, scores on held-out prompts, and log-prob differences
between engines and trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.entries import ESTIMATORS
from hybridflow.config.schema import RunConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import HybridFlowError, LogprobMismatchError
from hybridflow.observe.progress import Progress
from hybridflow.observe.rollouts import dump_path, remove_old_dumps
from hybridflow.rollout.dumps import dump_batch
from hybridflow.rollout.evaluation import Validator, extra_metrics, failures
from hybridflow.rollout.protocols import Engines, SyncReport
from hybridflow.trainer.metrics import (
    answer_metrics,
    batch_metrics,
    critic_metrics,
    log_prob_difference,
    preference_metrics,
    update_metrics,
)
from hybridflow.trainer.performance import Performance
from hybridflow.trainer.protocols import Role, Update
from hybridflow.trainer.samples import Samples
from hybridflow.trainer.session import Session

_OWN_SHOWN = 4


@dataclass
class Trained:
    """A step in which the policy or a critic was updated and whose metrics have not been written
    yet.

    Attributes:
        scored: the rows of `batch` that have old_log_probs: all rows, or only the first mini-batch
            if no separate pass computed them.
        updates: finished updates, keyed by role.
        critics: the critics' updates, which may still be running.
        metrics: metrics captured now because the next step overwrites them.
        own: metrics recorded by the flow, which are also displayed.
    """

    step: int
    batch: DataProto
    scored: DataProto
    updates: dict[str, Sequence[Update]]
    critics: dict[str, asyncio.Task[Sequence[Update]]] = field(default_factory=dict)
    synced: SyncReport | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)


class Records:
    """Writes metrics, progress and rollout dumps for each step.

    Args:
        others: the roles other than the policy.
    """

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        others: Mapping[str, Role],
        samples: Samples,
        validator: Validator,
    ) -> None:
        self.config = config
        self.session = session
        self.others = others
        self.samples = samples
        self.validator = validator
        self.performance = Performance(config)

    def check_log_probs(self, batch: DataProto, step: int, name: str = "") -> None:
        """Record the log-prob difference between engines and trainer for sampled answers. `name` is
        the name of an additional policy.

        Raises:
            LogprobMismatchError: the difference exceeds the bound, so the run would not train on
                the distribution that it samples from.
        """
        if "rollout_log_probs" not in batch:
            return
        # older weights differ by design
        made_by = step - 1 if self.config.trainer.max_staleness else None
        config = derived.policy_view(self.config, name) if name else self.config
        bound = derived.logprob_diff_bound(config)
        mean, largest = log_prob_difference(batch, made_by)
        self.session.totals["logprob_diff_sum"] = (
            self.session.totals.get("logprob_diff_sum", 0.0) + mean
        )
        self.session.note_max("logprob_diff_max", largest)
        # `not <=` instead of `>`, so that NaN also exceeds the bound
        of_policy = f" of the {name}" if name else ""
        if bound is not None and not mean <= bound:
            raise LogprobMismatchError(
                f"step {step}: engines and trainer{of_policy} differ by {mean:.2e} in mean "
                f"log-probability of the same tokens (bound {bound:.2e}, largest {largest:.2e}). "
                "The engines' weights differ from the trainer's, or the two compute different "
                "models; compare dtype and temperature, or raise rollout.logprob_diff_bound if the "
                "difference is expected."
            )

    async def validate(self, engines: Engines, step: int, progress: Progress) -> None:
        """Score answers to the held-out prompts, if there are any. The first set's score is added
        to the totals."""
        with self.session.timed("seconds_validation"):
            metrics = await self.validator.run(engines, step)
        if not metrics:
            return
        self.session.log(step, metrics, phase="val")
        tags = self.validator.tags
        for name in self.validator.datasets:
            folder = self.session.folder / f"validation{tags[name]}"
            self.session.tracker.rollouts(step, dump_path(folder, step))
        scores = {name: metrics[f"val{tags[name]}/score"] for name in self.validator.datasets}
        first = next(iter(scores.values()))
        self.session.totals.setdefault("score_before", first)
        self.session.totals["score_after"] = first
        for name, score in scores.items():
            what = "accuracy" if f"val{tags[name]}/accuracy" in metrics else "score"
            whose = f" of {name}" if name else ""
            progress.message(f"held-out {what}{whose} after step {step}: {score:.3f}")

    async def trained(self, trained: Trained, progress: Progress) -> None:
        """Write the metrics, progress and rollout dump of a step whose updates have finished.

        Raises:
            HybridFlowError: a gradient was not finite, and the configuration stops the run in this
                case.
        """
        updates = trained.updates
        batch = trained.batch
        scored = trained.scored
        synced = trained.synced
        seconds = self.session.timeline.metrics(trained.step)
        metrics = batch_metrics(batch, scored) | update_metrics(updates.get("actor", ()))
        for name in trained.critics:
            metrics |= critic_metrics(name, updates[name])
        metrics = (
            over_roles([metrics, *[await role.memory() for role in self.others.values()]])
            | trained.metrics
        )
        if ESTIMATORS.get(self.config.algorithm.adv_estimator).preferences:
            metrics |= preference_metrics(batch)
        metrics |= (synced.metrics() if synced else {}) | extra_metrics(batch) | seconds
        metrics |= self.performance.metrics(batch, seconds) | self._progress(trained.step)
        metrics["controller/share"] = self.session.controller_share
        metrics["trainer/restarts"] = self.session.totals.get("restarts", 0.0)
        metrics["rollout/restarts"] = self.session.totals.get("engine_restarts", 0.0)
        if "actor/first_ppo_kl" in metrics:
            self.session.note_max("first_ppo_kl_max", abs(metrics["actor/first_ppo_kl"]))
            metrics["actor/first_ppo_kl_max"] = self.session.totals["first_ppo_kl_max"]
        self.session.log(trained.step, metrics | trained.own)
        shown = {"reward": metrics["critic/score/mean"]}
        optional = {
            "ppo_kl": "actor/ppo_kl",
            "ref_kl": "actor/ref_kl",
            "preferred": "preference/accuracy",
        }
        shown |= {name: metrics[key] for name, key in optional.items() if key in metrics}
        shown["length"] = metrics["response_length/mean"]
        shown |= _shown(trained.own)
        if "score_after" in self.session.totals:
            shown["held-out"] = self.session.totals["score_after"]
        progress.update(trained.step, shown, seconds)
        self._dump(trained.step, batch, scored if len(scored) == len(batch) else batch, progress)
        if self.config.actor.on_nonfinite == "stop":
            self._stop_if_skipped(trained.step, updates)

    def of_policy(
        self, name: str, tokenizer: Tokenizer, trained: Trained | None, step: int
    ) -> dict[str, float]:
        """Return the metrics of an additional policy's update in a step, prefixed with the policy's
        name, and write the dump of its samples.

        Raises:
            HybridFlowError: a gradient was not finite, and the policy's settings stop the run in
                this case.
        """
        if trained is None:
            return {}
        metrics = batch_metrics(trained.batch, trained.scored) | trained.metrics
        metrics |= update_metrics(trained.updates.get("actor", ()))
        metrics |= trained.synced.metrics() if trained.synced else {}
        whole = trained.scored if len(trained.scored) == len(trained.batch) else trained.batch
        if self.session.is_due(self.config.trainer.dump_rollouts_every_steps, step):
            folder = self.session.folder / f"rollouts-{name}"
            dump_batch(folder, step, whole, tokenizer)
            self._dumped(folder, step)
        if self.config.roles[name].actor.on_nonfinite == "stop":
            self._stop_if_skipped(step, {f"roles.{name}.actor": trained.updates["actor"]})
        return {f"{name}/{key}": value for key, value in metrics.items()}

    def rollouts(
        self, step: int, batch: DataProto, progress: Progress, own: dict[str, float]
    ) -> None:
        """Write the metrics, progress and rollout dump of a step without training. `own` contains
        metrics recorded by the flow.
        """
        seconds = self.session.timeline.metrics(step)
        metrics = (
            answer_metrics(batch) | dict(self.samples.metrics) | extra_metrics(batch) | seconds
        )
        self.session.log(step, metrics | own)
        shown = {"reward": metrics["critic/score/mean"], "length": metrics["response_length/mean"]}
        shown |= _shown(own)
        progress.update(step, shown, seconds)
        self._dump(step, batch, batch, progress)

    def _progress(self, step: int) -> dict[str, float]:
        """Return the step number and the epoch of the step's first prompt. Epochs are counted from
        0, as in verl.
        """
        seen = (step - 1) * self.config.data.train_batch_size
        epoch = seen // max(self.samples.num_rows, 1)
        return {"training/global_step": float(step), "training/epoch": float(epoch)}

    def _dump(self, step: int, batch: DataProto, scored: DataProto, progress: Progress) -> None:
        """Report rows without a score, and write the dump if one is due."""
        for line in failures(batch):
            progress.message(f"step {step}: {line}")
        dumped = self.session.is_due(self.config.trainer.dump_rollouts_every_steps, step)
        if dumped:
            folder = self.session.folder / "rollouts"
            self.samples.dump(folder, step, scored)
            self._dumped(folder, step)

    def _dumped(self, folder: Path, step: int) -> None:
        """Hand a new dump to the trackers, and delete the dumps that the settings do not keep."""
        self.session.tracker.rollouts(step, dump_path(folder, step))
        trainer = self.config.trainer
        if trainer.keep_rollout_steps is not None:
            remove_old_dumps(folder, trainer.keep_rollout_steps, trainer.keep_rollouts_every_steps)

    def _stop_if_skipped(self, step: int, updates: Mapping[str, Sequence[Update]]) -> None:
        for role, done in updates.items():
            if not all(update.applied for update in done):
                raise HybridFlowError(
                    f"step {step}: a gradient of the {role} is not finite (norms "
                    f"{[update.grad_norm for update in done]}), so that update was not applied. "
                    f"Reduce {role}.optim.lr and run the same command again to resume from the "
                    "last checkpoint."
                )


def over_roles(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the `memory_metrics` of all roles. If several roles report the same metric (the step's
    peaks), the maximum is used.
    """
    merged: dict[str, float] = {}
    for one in metrics:
        merged |= {name: max(value, merged.get(name, value)) for name, value in one.items()}
    return merged


def _shown(own: Mapping[str, float]) -> dict[str, float]:
    """Return the flow's metrics to show on the console: the mean sampled score if the flow has
    replaced the scores, and the first few numbers that the flow recorded.
    """
    short = {}
    for key, value in own.items():
        name, _, metric = key.partition("/")
        if key == "critic/sampled_score/mean":
            short["sampled"] = value
        elif name == "flow":
            short[metric] = value
        elif metric == "critic/score/mean":
            short[name] = value  # an additional policy's score
    return dict(islice(short.items(), _OWN_SHOWN))
