"""Training of a reward model on preference pairs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.schema import RewardTrainingConfig
from hybridflow.data.dataset import PreferenceDataset
from hybridflow.data.sampler import ResumableSampler
from hybridflow.errors import HybridFlowError
from hybridflow.saving.store import Checkpoint
from hybridflow.trainer.protocols import Role
from hybridflow.trainer.session import Session
from hybridflow.workers.model_role import ModelWorker

_SCORED_AT_ONCE = 512  # held-out pairs


class RewardTrainer:
    """`config.steps` updates on pairs."""

    def __init__(
        self,
        config: RewardTrainingConfig,
        session: Session,
        model: Role,
        dataset: PreferenceDataset,
        seed: int,
    ) -> None:
        self.config, self.session, self.model, self.dataset = config, session, model, dataset
        self.sampler = ResumableSampler(len(dataset), config.batch_size, True, seed)
        self.step = 0

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue after a checkpoint of this phase."""
        self.model.run(ModelWorker.load, checkpoint.policy, self.config.optim)
        self.sampler.restore(checkpoint.state["sampler"])
        self.step = checkpoint.step

    def fit(self) -> None:
        """Run all remaining steps and checkpoint the end."""
        session, every = self.session, self.session.config.trainer.save_every_steps
        with (
            session.timed("seconds_reward"),
            session.progress(self.config.steps, "reward model", self.step, throttle_s=5.0) as progress,
        ):
            while self.step < self.config.steps:
                started = time.perf_counter()
                [update] = self.model.update(ModelWorker.pair_step, self.dataset.batch(next(self.sampler)))
                self.step += 1
                if session.config.actor.on_nonfinite == "stop" and not update.applied:
                    raise HybridFlowError(
                        f"reward step {self.step}: the gradient is not finite (loss {update.means['loss']}); lower "
                        "reward_training.optim.lr"
                    )
                means = {("reward/loss" if name == "loss" else name): value for name, value in update.means.items()}
                seconds = {"step": time.perf_counter() - started}
                metrics = means | {
                    "reward/grad_norm": update.grad_norm,
                    "reward/lr": update.lr,
                    "timing_s/step": seconds["step"],
                }
                session.tracker.log(self.step, metrics, phase="reward")
                shown = {"loss": means["reward/loss"], "accuracy": means["reward/accuracy"]}
                progress.update(self.step, shown, seconds)
                session.store.check()
                last = self.step == self.config.steps
                if session.is_due(every, self.step) or last or session.stop_asked:
                    self.save()
                    if not last:
                        session.stop_if_asked()

    def save(self) -> Path:
        """Checkpoint this phase."""
        state: dict[str, Any] = {"sampler": self.sampler.state(), "totals": self.session.totals_now()}
        return self.session.store.save("reward", self.step, state, self.model)


def pair_accuracy(model: Role, dataset: PreferenceDataset) -> dict[str, float]:
    """Share of pairs whose chosen answer scores higher, and the mean difference."""
    differences = []
    for start in range(0, len(dataset), _SCORED_AT_ONCE):
        batch = dataset.batch(np.arange(start, min(start + _SCORED_AT_ONCE, len(dataset))))
        chosen, rejected = (_scores(model, batch, name) for name in ("chosen_ids", "rejected_ids"))
        differences.append(chosen - rejected)
    difference = np.concatenate(differences)
    return {"accuracy": float((difference > 0).mean()), "margin": float(difference.mean())}


def _scores(model: Role, batch: DataProto, name: str) -> np.ndarray:
    rows = DataProto.from_columns({"prompt_ids": batch.jagged("prompt_ids"), "response_ids": batch.jagged(name)})
    return np.asarray(model.compute(ModelWorker.compute_scores, rows)["rm_scores"])
