"""The reinforcement-learning loop.

                 prompts                responses, log-probs           scores
    dataset ──────────────▶ engines ──────────────────────▶ reward ─────────────┐
                               ▲                                                ▼
                 weights       │       update      advantages       old and reference log-probs
    sync  ◀──────────────── policy ◀─────── group-relative, or GAE ◀─────── policy, critic

Token columns that workers and engines write stay in the object store; the batch holds references,
and reading a column fetches it. One step consumes `data.train_batch_size` prompts (x `rollout.n`
samples) and ends with new weights in every engine.

Passes of roles with devices of their own run at the same time (`devices`). The policy's weights are
all that the next answers need, so that the update of a critic that shares no devices with policy
and engines lasts into the generation of the next step, and its own step is recorded after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.config.val_sets import tag
from hybridflow.errors import CheckpointError, HybridFlowError, LogprobMismatchError
from hybridflow.observe.progress import Progress
from hybridflow.rollout.evaluation import Validator, extra_metrics, failures
from hybridflow.rollout.protocols import Engines, SyncReport
from hybridflow.saving.store import Checkpoint
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.devices import Devices
from hybridflow.trainer.metrics import (
    answer_metrics,
    batch_metrics,
    critic_metrics,
    log_prob_difference,
    preference_metrics,
    update_metrics,
)
from hybridflow.trainer.observations import over_roles
from hybridflow.trainer.passes import Passes
from hybridflow.trainer.phases import Phases
from hybridflow.trainer.protocols import Policy, Role, Update
from hybridflow.trainer.samples import Samples
from hybridflow.trainer.session import Session
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker


@dataclass
class Trained:
    """A step whose policy was updated, until it is recorded.

    Attributes:
        scored: the rows of `batch` with old_log_probs: all of them, or where no pass computed
            these, those of the first mini-batch.
        updates: of the roles whose update has ended. critic: the critic's, which may still run.
        metrics: what the next step would overwrite.
    """

    step: int
    batch: DataProto
    scored: DataProto
    updates: dict[str, Sequence[Update]]
    critic: asyncio.Task[Sequence[Update]] | None = None
    synced: SyncReport | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class RLTrainer:
    """GRPO, or with a critic PPO, over the roles of the run and engines.

    Args:
        roles: `actor`, and as far as the run has them critic, reward_model, teacher and a reference
            in processes of its own.
        engines: answer, and take the policy's weights.
        samples: what each step trains on.
    """

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        roles: Mapping[str, Role],
        engines: Engines,
        samples: Samples,
        validator: Validator,
    ) -> None:
        self.config = config
        self.session = session
        self.engines = engines
        self.samples = samples
        self.validator = validator
        self.policy = cast(Policy, roles["actor"])
        self.others = {name: role for name, role in roles.items() if name != "actor"}
        self.critic = self.others.get("critic")
        self.reference = self.others.get("reference")
        self.advantages = Advantages(config)
        self.devices = Devices(lambda role: derived.pool_of(config, role), session.timeline)
        self.phases = Phases(config, self.policy, engines, self.others, self.devices.is_busy)
        self.passes = Passes(config, self.devices, self.policy, self.others)
        self.step = 0
        self.last = derived.total_steps(config, samples.num_rows) or 1
        self.unrecorded: Trained | None = None
        self.left_out: set[str] = set()

    # ---- the loop

    async def fit(self) -> None:
        """Run all remaining steps, with validation before, during and after."""
        trainer = self.config.trainer
        phase = self.session.timeline.phase
        with self.session.progress(
            self.last, "PPO" if self.critic else "GRPO", self.step
        ) as progress:
            if self.step == 0 and self.config.sft.steps:
                # ranks that are lost from here on come back with the warm start
                await self.session.store.wait()
            await self.sync_weights(progress)
            if self.step == 0 and trainer.val_before_train:
                await self.validate(progress)
            ends_at = self.samples.last_after(self.step)
            last = self.last if ends_at is None else min(self.last, ends_at)
            while self.step < last:
                self.step += 1
                with (
                    self.session.timed("seconds_grpo"),
                    phase("step", self.step),
                    self.session.controlled(),
                ):
                    batch = await self.samples.take(self.step)
                    if trainer.rollout_only:
                        batch = await self.passes.with_model_scores(batch, self.step)
                    else:
                        self.unrecorded = await self.trained_on(batch, progress)
                if self.unrecorded is None:
                    await self.record_rollouts(batch, progress)
                    continue
                if self.unrecorded.critic is None or self.unrecorded.critic.done():
                    await self.record(progress)
                await self.session.store.check()
                await self.save_if_due(last, progress)

    async def trained_on(self, batch: DataProto, progress: Progress) -> Trained:
        """Train on a step's samples and bring the weights to the engines; validate where it is
        due."""
        trainer = self.config.trainer
        phase = self.session.timeline.phase
        async with self.phases.training():
            batch, later = await self.passes.before_advantages(
                batch, self.step, self.update_seed(), self.scores_first
            )
            await self.record(progress)  # the critic has ended its update of the step before
            with phase("adv"):
                batch = self.samples.keep(self.advantages.add(batch))
            if self.scores_first:
                self.check_log_probs(batch)
            trained = await self.update(batch, later)
        validates = self.step == self.last or self.session.is_due(
            trainer.test_every_steps, self.step
        )
        if self.config.data.answers == "sampled" or validates:  # nobody asks the engines otherwise
            with phase("update_weights"):
                trained.synced = await self.sync_weights(progress)
        if validates:
            with phase("testing"):
                await self.validate(progress)
        trained.metrics = {**self.samples.metrics, **self.advantages.metrics}
        return trained

    # ---- parts of a step

    @property
    def scores_first(self) -> bool:
        """Whether a pass of its own computes old log-probs of all rows of this step; otherwise its
        first update reports those of its rows."""
        return (
            derived.scores_before_update(self.config)
            or self.step <= self.config.trainer.critic_warmup
        )

    async def update(self, batch: DataProto, later: DataProto | None) -> Trained:
        """The step's updates of critic and policy; `later` holds what a pass over some rows has
        computed. On devices of its own the critic is updated beside the policy, and goes on when
        this returns."""
        seed = self.update_seed()
        trained = Trained(self.step, batch, batch, {})
        if self.critic:
            updating = self.critic.update(ModelWorker.update_critic, batch, seed)
            trained.critic = self.devices.call("critic", "update_critic", self.step, updating)
        if not self.scores_first:
            scoring = self.policy.update_and_score(batch, seed, later)
            call = self.devices.call("actor", "update_actor", self.step, scoring)
            trained.updates["actor"], trained.scored = await self.devices.result(call)
            # an error here still comes before anybody gets the update
            self.check_log_probs(trained.scored)
        elif self.step > self.config.trainer.critic_warmup:
            learning = self.policy.update(PolicyWorker.update_policy, batch, seed)
            update = self.devices.call("actor", "update_actor", self.step, learning)
            trained.updates["actor"] = await self.devices.result(update)
        await self.devices.finish_pool("actor")
        await self.devices.finish_pool("rollout")  # engines on the critic's devices wait for it
        return trained

    def update_seed(self) -> int:
        """Seed of the step's mini-batches, the same in a resumed run."""
        return self.config.seed * 1_000_003 + self.step

    def check_log_probs(self, batch: DataProto) -> None:
        """Record how far engines and trainer differ, of answers that an engine has sampled.

        Raises:
            LogprobMismatchError: by more than the bound: the run would not train on what it
                samples.
        """
        if "rollout_log_probs" not in batch:
            return
        # older weights differ by design
        made_by = self.step - 1 if self.config.trainer.max_staleness else None
        bound = derived.logprob_diff_bound(self.config)
        mean, largest = log_prob_difference(batch, made_by)
        self.session.totals["logprob_diff_sum"] = (
            self.session.totals.get("logprob_diff_sum", 0.0) + mean
        )
        self.session.note_max("logprob_diff_max", largest)
        # `not <=` rather than `>`: NaN is beyond the bound too
        if bound is not None and not mean <= bound:
            raise LogprobMismatchError(
                f"step {self.step}: engines and trainer differ by {mean:.2e} in mean "
                f"log-probability of the same tokens (bound {bound:.2e}, largest {largest:.2e}). "
                "The weights in the engines are not those of the trainer, or the two compute "
                "another model; compare dtype and temperature, or raise rollout.logprob_diff_bound "
                "if the difference is expected."
            )

    async def sync_weights(self, progress: Progress) -> SyncReport:
        """Send the present weights to the engines; say which engines were left out or have joined
        again."""
        async with self.phases.sync():
            synced = await self.engines.sync(self.step)
        for engine, why in synced.stale.items():
            if engine in self.left_out:
                continue  # said already
            progress.message(
                f"step {self.step}: {engine} is left out until it takes new weights: {why}"
            )
        for engine in sorted(self.left_out - synced.stale.keys()):
            progress.message(f"step {self.step}: {engine} has taken weights again")
        self.left_out = set(synced.stale)
        return synced

    async def validate(self, progress: Progress) -> None:
        """Scores answers to the held-out prompts; does nothing without any. The totals have the
        score of the first set."""
        with self.session.timed("seconds_validation"):
            metrics = await self.validator.run(self.engines, self.step)
        if not metrics:
            return
        self.session.log(self.step, metrics, phase="val")
        scores = {name: metrics[f"val{tag(name)}/score"] for name in self.validator.datasets}
        first = next(iter(scores.values()))
        self.session.totals.setdefault("score_before", first)
        self.session.totals["score_after"] = first
        for name, score in scores.items():
            what = "accuracy" if f"val{tag(name)}/accuracy" in metrics else "score"
            whose = f" of {name}" if name else ""
            progress.message(f"held-out {what}{whose} after step {self.step}: {score:.3f}")

    async def record(self, progress: Progress) -> None:
        """Write metrics, progress and rollout dump of the step that was trained last, if they are
        not written yet; waits for its critic.

        Raises:
            HybridFlowError: a gradient was not finite, and the configuration stops the run on that.
        """
        if self.unrecorded is None:
            return
        trained = self.unrecorded
        updates = self.unrecorded.updates
        if trained.critic:
            updates["critic"] = await self.devices.result(trained.critic)
        self.unrecorded = None
        batch = trained.batch
        scored = trained.scored
        synced = trained.synced
        seconds = self.session.timeline.metrics(trained.step)
        metrics = (
            batch_metrics(batch, scored)
            | update_metrics(updates.get("actor", ()))
            | critic_metrics(updates.get("critic", ()))
        )
        metrics = (
            over_roles([metrics, *[await role.memory() for role in self.others.values()]])
            | trained.metrics
        )
        if self.advantages.estimator.preferences:
            metrics |= preference_metrics(batch)
        metrics |= (synced.metrics() if synced else {}) | extra_metrics(batch) | seconds
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / max(
            seconds.get("timing_s/step", 0.0), 1e-9
        )
        metrics["controller/share"] = self.session.controller_share
        metrics["trainer/restarts"] = self.session.totals.get("restarts", 0.0)
        metrics["rollout/restarts"] = self.session.totals.get("engine_restarts", 0.0)
        if "actor/first_ppo_kl" in metrics:
            self.session.note_max("first_ppo_kl_max", abs(metrics["actor/first_ppo_kl"]))
            metrics["actor/first_ppo_kl_max"] = self.session.totals["first_ppo_kl_max"]
        self.session.log(trained.step, metrics)
        shown = {"reward": metrics["critic/score/mean"]}
        optional = {
            "ppo_kl": "actor/ppo_kl",
            "ref_kl": "actor/ref_kl",
            "preferred": "preference/accuracy",
        }
        shown |= {name: metrics[key] for name, key in optional.items() if key in metrics}
        shown["length"] = metrics["response_length/mean"]
        if "score_after" in self.session.totals:
            shown["held-out"] = self.session.totals["score_after"]
        progress.update(trained.step, shown, seconds)
        self._dump(trained.step, batch, scored if len(scored) == len(batch) else batch, progress)
        if self.config.actor.on_nonfinite == "stop":
            self._stop_if_skipped(trained.step, updates)

    async def record_rollouts(self, batch: DataProto, progress: Progress) -> None:
        """Write metrics, progress and dump of a step without training."""
        seconds = self.session.timeline.metrics(self.step)
        metrics = (
            answer_metrics(batch) | dict(self.samples.metrics) | extra_metrics(batch) | seconds
        )
        self.session.log(self.step, metrics)
        shown = {"reward": metrics["critic/score/mean"], "length": metrics["response_length/mean"]}
        progress.update(self.step, shown, seconds)
        self._dump(self.step, batch, batch, progress)
        await self.session.stop_if_asked()

    def _dump(self, step: int, batch: DataProto, scored: DataProto, progress: Progress) -> None:
        """Say which rows have no score, and write the dump where one is due."""
        for line in failures(batch):
            progress.message(f"step {step}: {line}")
        dumped = self.session.is_due(self.config.trainer.dump_rollouts_every_steps, step)
        if dumped:
            self.samples.dump(self.session.folder / "rollouts", step, scored)

    def _stop_if_skipped(self, step: int, updates: Mapping[str, Sequence[Update]]) -> None:
        for role, done in updates.items():
            if not all(update.applied for update in done):
                raise HybridFlowError(
                    f"step {step}: a gradient of the {role} is not finite (norms "
                    f"{[update.grad_norm for update in done]}); that update was not applied. Lower "
                    f"{role}.optim.lr and run the same command again to resume from the last "
                    "checkpoint."
                )

    # ---- checkpoints

    async def save_if_due(self, last_step: int, progress: Progress) -> None:
        """Checkpoint where one is due, after the last step, and where the run was asked to stop,
        which it then does."""
        last = self.step == last_step
        every = self.config.trainer.save_every_steps
        if self.session.is_due(every, self.step) or last or self.session.stop_asked:
            await self.record(progress)  # the critic's update ends first
            with self.session.timeline.phase("save_checkpoint", self.step):
                await self.save()
            if not last:
                await self.session.stop_if_asked()

    async def save(self) -> Path:
        """Checkpoint after `self.step`."""
        state: dict[str, Any] = {
            **self.samples.state(),
            "totals": self.session.totals_now(),
            "advantages": self.advantages.state(),
        }
        others = {"critic": self.critic} if self.critic else {}
        rollouts = await self.samples.begun()
        return await self.session.store.save(
            "rl", self.step, state, self.policy, rollouts=rollouts, **others
        )

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Go on after a checkpoint of this phase.

        Raises:
            CheckpointError: it is of a run without a critic, and this one has one.
        """
        swapped = derived.needs_reference(self.config) and not self.reference
        await self.policy.call(
            PolicyWorker.load, checkpoint.policy, self.config.actor.optim, swapped
        )
        await self.fill_reference()
        if self.critic:
            await self.critic.call(ModelWorker.load, checkpoint.critic, self.config.critic.optim)
        with checkpoint.restoring():
            if self.session.has_other_data(checkpoint):
                await self.samples.restore(None)
            else:
                await self.samples.restore(checkpoint.state, checkpoint.rollouts(), checkpoint.step)
            if "advantages" in checkpoint.state:
                self.advantages.restore(checkpoint.state["advantages"])
        self.step = checkpoint.step

    async def go_back(self) -> None:
        """After the ranks that train were started again: to the last checkpoint of this phase, or
        to its beginning.

        Raises:
            CheckpointError: the run had a warm start, and no checkpoint holds its weights.
        """
        self.unrecorded = None
        self.session.store.settle()
        checkpoint = self.session.store.latest()
        if checkpoint is not None and checkpoint.phase != "rl":
            checkpoint = None
        if checkpoint is None and self.config.sft.steps:
            raise CheckpointError(
                f"{self.session.folder / 'checkpoints'}: no checkpoint holds the weights of the "
                "warm start, and the ranks have lost them; run the same command again to repeat it"
            )
        self.session.go_back(checkpoint)
        if checkpoint is not None:
            await self.resume(checkpoint)
            return
        await self.samples.restore(None)
        self.advantages = Advantages(self.config)
        self.step = 0
        await self.start_from_present_weights()

    async def start_from_present_weights(self) -> None:
        """Begin the phase with fresh optimizers. The present weights become the reference's, and
        the critic's unless it has its own."""
        if derived.needs_reference(self.config) and not self.reference:
            await self.policy.call(PolicyWorker.freeze_reference)
        await self.policy.call(PolicyWorker.set_optimizer, self.config.actor.optim)
        roles = [
            (self.reference, self.config.reference.path),
            (self.critic, self.config.critic.path),
        ]
        if any(role and path is None for role, path in roles):
            await self.policy.call(PolicyWorker.export, self.start_folder)
        await self.fill_reference()
        if self.critic:
            if self.config.critic.path is None:
                await self.critic.call(ModelWorker.fill, self.start_folder)
            await self.critic.call(ModelWorker.set_optimizer, self.config.critic.optim)

    async def fill_reference(self) -> None:
        """Give a reference in processes of its own the weights of the policy as the phase began;
        another model has its own already."""
        if self.reference and self.config.reference.path is None:
            await self.reference.call(ModelWorker.fill, self.start_folder)

    @property
    def start_folder(self) -> Path:
        """Hugging Face folder of the policy as the phase began, for roles that start from it in
        other processes."""
        return self.session.folder / "model" / "start"
