"""The reinforcement-learning loop.

                 prompts                responses, log-probs           scores
    dataset ──────────────▶ engines ──────────────────────▶ reward ─────────────┐
                               ▲                                                ▼
                 weights       │       update      advantages       old and reference log-probs
    sync  ◀──────────────── policy ◀─────────── group-relative ◀─────────── policy

Token columns that workers and engines write stay in the object store; the batch holds references, and reading a column fetches it.
One step consumes `data.train_batch_size` prompts (x `rollout.n` samples) and unblocks the next with new weights in every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.algorithms.advantages import grpo_advantages
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.data.custom import Prompts, open_sampler
from hybridflow.errors import HybridFlowError, LogprobMismatchError
from hybridflow.observe.progress import Progress
from hybridflow.protocol import DataProto
from hybridflow.single_controller import keep_in_store
from hybridflow.trainer.checkpoints import Checkpoint
from hybridflow.trainer.evaluate import Scorer, Validator, dump_batch
from hybridflow.trainer.metrics import batch_metrics, kl_sums, log_prob_difference, spread_over_tokens, update_metrics
from hybridflow.trainer.phases import Phases
from hybridflow.trainer.protocols import RolloutService, TrainGroup, Update, WeightSync
from hybridflow.trainer.session import Session


class RLTrainer:
    """GRPO over a train group, a rollout service and a weight sync."""

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        policy: TrainGroup,
        engines: RolloutService,
        weights: WeightSync,
        dataset: Prompts,
        scorer: Scorer,
        validator: Validator,
    ) -> None:
        self.config, self.session, self.policy, self.engines, self.weights = config, session, policy, engines, weights
        self.dataset, self.scorer, self.validator = dataset, scorer, validator
        self.phases = Phases(config, policy, engines)
        self.sampler = open_sampler(config.data, dataset, config.seed)
        self._first_order = self.sampler.state()
        self.step = 0

    # ---- the loop ---------------------------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Run all remaining steps, with validation before, during and after."""
        trainer, phase = self.config.trainer, self.session.timeline.phase
        with self.session.progress(trainer.total_steps, "GRPO", self.step) as progress:
            self.sync()
            if self.step == 0 and trainer.val_before_train:
                self.validate(progress)
            while self.step < trainer.total_steps:
                self.step += 1
                with self.session.timed("seconds_grpo"), phase("step", self.step), self.session.controlled():
                    batch = self.next_prompts()
                    with phase("gen"):
                        batch = batch.union(self.engines.generate(batch, self.config.rollout.sampling))
                    with phase("reward"):
                        batch = batch.union(self.scorer.score(batch))
                    with self.phases.training():
                        with phase("old_log_prob"):
                            batch = batch.union(self.policy.log_probs(batch))
                        if derived.needs_reference(self.config):
                            with phase("ref"):
                                batch = batch.union(self.policy.ref_log_probs(batch))
                        with phase("adv"):
                            batch = self.with_advantages(batch)
                        self.check_log_probs(batch)
                        with phase("update_actor"):
                            updates = self.policy.update(batch, seed=self.config.seed * 1_000_003 + self.step)
                    with phase("update_weights"):
                        self.sync()
                    if self.session.is_due(trainer.test_every_steps, self.step) or self.step == trainer.total_steps:
                        with phase("testing"):
                            self.validate(progress)
                self.record(batch, updates, progress)
                self.session.store.check()
                if self.session.is_due(trainer.save_every_steps, self.step) or self.step == trainer.total_steps:
                    with phase("save_checkpoint", self.step):
                        self.save()

    # ---- parts of a step --------------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """The policy's weights of now to every engine."""
        with self.phases.sync():
            self.weights.sync(self.step)

    def next_prompts(self) -> DataProto:
        """The next prompts, each repeated `rollout.n` times; `uid` tells the samples of one prompt."""
        batch = self.dataset.batch(next(self.sampler))
        return keep_in_store(batch.with_columns(uid=np.arange(len(batch), dtype=np.int64)).repeat(self.config.rollout.n))

    def with_advantages(self, batch: DataProto) -> DataProto:
        """Adds rewards [B] (score less the KL penalty) and advantages (jagged, the sample's value at each token)."""
        rewards = np.asarray(batch["scores"], dtype=np.float32)
        if self.config.algorithm.kl_coef:
            rewards = rewards - self.config.algorithm.kl_coef * kl_sums(batch).astype(np.float32)
        values = grpo_advantages(
            torch.tensor(rewards), torch.tensor(batch["uid"]), norm_by_std=self.config.algorithm.norm_adv_by_std
        ).numpy()
        return keep_in_store(batch.with_columns(rewards=rewards, advantages=spread_over_tokens(values, batch.lengths("response_ids"))))

    def check_log_probs(self, batch: DataProto) -> None:
        """Stop a run whose engines and trainer disagree: it would train on something else than it samples."""
        bound, (mean, largest) = self.config.rollout.logprob_diff_bound, log_prob_difference(batch)
        self.session.totals["logprob_diff_sum"] = self.session.totals.get("logprob_diff_sum", 0.0) + mean
        self.session.note_max("logprob_diff_max", largest)
        # written so that NaN, too, is beyond the bound
        if bound is not None and not mean <= bound:
            raise LogprobMismatchError(
                f"step {self.step}: engines and trainer differ by {mean:.2e} in mean log-probability of the same tokens "
                f"(bound {bound:.2e}, largest {largest:.2e}). The weights in the engines are not those of the trainer, or the "
                "two compute another model; compare dtype and temperature, or raise rollout.logprob_diff_bound if the difference is "
                "expected (bfloat16)."
            )

    def validate(self, progress: Progress) -> None:
        """Greedy accuracy on the held-out set."""
        with self.session.timed("seconds_validation"):
            metrics = self.validator.run(self.engines, self.step)
        self.session.tracker.log(self.step, metrics, phase="val")
        accuracy = metrics["val/accuracy"]
        self.session.totals.setdefault("accuracy_before", accuracy)
        self.session.totals["accuracy_after"] = accuracy
        progress.message(f"held-out accuracy after step {self.step}: {accuracy:.3f}")

    def record(self, batch: DataProto, updates: Sequence[Update], progress: Progress) -> None:
        """Metrics, progress and rollout dump of a finished step; a step without a finite gradient stops the run."""
        seconds = self.session.timeline.metrics(self.step)
        metrics = batch_metrics(batch) | update_metrics(updates) | seconds
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / max(seconds.get("timing_s/step", 0.0), 1e-9)
        metrics["controller/share"] = self.session.controller_share
        metrics["trainer/restarts"] = self.session.totals.get("restarts", 0.0)
        self.session.note_max("first_ppo_kl_max", abs(metrics["actor/first_ppo_kl"]))
        metrics["actor/first_ppo_kl_max"] = self.session.totals["first_ppo_kl_max"]
        self.session.tracker.log(self.step, metrics)
        shown = {"reward": metrics["critic/score/mean"], "kl": metrics["actor/ppo_kl"], "length": metrics["response_length/mean"]}
        if "accuracy_after" in self.session.totals:
            shown["accuracy"] = self.session.totals["accuracy_after"]
        progress.update(self.step, shown, seconds)
        if self.session.is_due(self.config.trainer.dump_rollouts_every_steps, self.step):
            dump_batch(self.session.folder / "rollouts", self.step, batch, self.scorer.tokenizer)
        if not all(update.applied for update in updates):
            raise HybridFlowError(
                f"step {self.step}: a gradient is not finite (norms {[update.grad_norm for update in updates]}); that update was not "
                "applied. Lower actor.optim.lr and run the same command again to resume from the last checkpoint."
            )

    # ---- checkpoints ------------------------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Checkpoint after `self.step`."""
        state: dict[str, Any] = {"sampler": self.sampler.state(), "totals": self.session.totals_now()}
        return self.session.store.save("rl", self.step, state, self.policy)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on after a checkpoint of this phase."""
        self.policy.load(checkpoint.policy, self.config.actor.optim, with_reference=derived.needs_reference(self.config))
        self.sampler.restore(checkpoint.state["sampler"])
        self.step = checkpoint.step

    def go_back(self) -> None:
        """After the policy's ranks were started again: to the last checkpoint of this phase, or to its beginning where there is none."""
        checkpoint = self.session.store.latest()
        if checkpoint is not None and checkpoint.phase != "rl":
            checkpoint = None
        self.session.go_back(checkpoint)
        if checkpoint is not None:
            self.resume(checkpoint)
            return
        self.sampler.restore(self._first_order)
        self.step = 0
        self.start_from_present_weights()

    def start_from_present_weights(self) -> None:
        """Begin the phase: the present weights are the reference, the optimizer is fresh."""
        if derived.needs_reference(self.config):
            self.policy.freeze_reference()
        self.policy.set_optimizer(self.config.actor.optim)
