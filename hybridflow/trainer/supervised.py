"""Training on a dataset instead of generated answers: supervised fine-tuning (as a run's warm start
or as a separate job) and reward-model training on preference pairs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.schema import RewardTrainingConfig, SftConfig
from hybridflow.data.dataset import PreferenceDataset, SftDataset
from hybridflow.data.images import COLUMN, with_pixels
from hybridflow.data.sampler import ResumableSampler
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.observe.trackers.base import Phase
from hybridflow.saving.store import Checkpoint
from hybridflow.trainer.protocols import Role
from hybridflow.trainer.session import Session
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker

_SCORED_AT_ONCE = 512  # held-out pairs


class SupervisedTrainer:
    """Runs `config.steps` updates on batches of a dataset. `config` is the configuration section
    named `section`.
    """

    phase: ClassVar[Phase]
    section: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]  # of the progress bar
    load: ClassVar[Callable[..., Any]]  # methods of the model's worker
    train: ClassVar[Callable[..., Any]]
    saves_end = False  # False: the caller saves

    def __init__(
        self,
        config: SftConfig | RewardTrainingConfig,
        session: Session,
        model: Role,
        dataset: SftDataset | PreferenceDataset,
        seed: int,
    ) -> None:
        self.config = config
        self.session = session
        self.model = model
        self.dataset = dataset
        if config.batch_size > len(dataset):
            raise ConfigError(
                f"{self.section}.batch_size={config.batch_size} is more than the {len(dataset)} "
                f"rows of {self.section}.train_files: rows would repeat within a step; reduce it, "
                "or use more data"
            )
        self.sampler = ResumableSampler(len(dataset), config.batch_size, True, seed)
        self.step = 0

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint of this phase."""
        await self.model.call(type(self).load, checkpoint.policy, self.config.optim)
        if not self.session.has_other_data(checkpoint):
            with checkpoint.restoring():
                self.sampler.restore(checkpoint.state["sampler"])
        self.step = checkpoint.step

    async def fit(self, on_step: Callable[[], Awaitable[None]] | None = None) -> None:
        """Run all remaining steps. `on_step` is awaited between steps, for example to detect an
        engine that failed to start.
        """
        session = self.session
        every = self.session.config.trainer.save_every_steps
        with (
            session.timed(f"seconds_{self.phase}"),
            session.progress(self.config.steps, self.title, self.step, throttle_s=5.0) as progress,
        ):
            while self.step < self.config.steps:
                started = time.perf_counter()
                batch = self.dataset.batch(next(self.sampler))
                if COLUMN in batch:
                    batch = with_pixels(batch, self.dataset)
                [update] = await self.model.update(type(self).train, batch)
                self.step += 1
                loss = update.means.get("loss", float("nan"))
                if session.config.actor.on_nonfinite == "stop" and not update.applied:
                    raise HybridFlowError(
                        f"{self.name} step {self.step}: the gradient is not finite (loss {loss}); "
                        f"reduce {self.section}.optim.lr"
                    )
                seconds = time.perf_counter() - started
                facts = {"grad_norm": update.grad_norm, "lr": update.lr}
                metrics = {
                    f"{self.phase}/{name}": value for name, value in {"loss": loss, **facts}.items()
                }
                metrics |= self.also(update.means) | {"timing_s/step": seconds}
                session.log(self.step, metrics, phase=self.phase)
                shown = {
                    name: metrics[f"reward/{name}"]
                    for name in ("accuracy",)
                    if f"reward/{name}" in metrics
                }
                progress.update(self.step, {"loss": loss, **shown}, {"step": seconds})
                if on_step is not None:
                    await on_step()
                await session.store.check()
                is_last = self.step == self.config.steps
                if (
                    self.saves_end
                    if is_last
                    else session.is_due(every, self.step) or session.stop_asked
                ):
                    await self.save()
                if not is_last:
                    await session.stop_if_asked()

    def also(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics besides the loss that are recorded from an update's means."""
        return {}

    async def save(self) -> Path:
        """Save a checkpoint of this phase."""
        state: dict[str, Any] = {
            "sampler": self.sampler.state(),
            "totals": self.session.totals_now(),
        }
        return await self.session.store.save(self.phase, self.step, state, self.model)


class SftTrainer(SupervisedTrainer):
    """Trains the policy on demonstrations."""

    phase = "sft"
    section = "sft"
    name = "SFT"
    title = "SFT"
    load = PolicyWorker.load
    train = PolicyWorker.sft_step

    def also(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the prediction heads, which are trained along with the model
        (`actor.mtp`).
        """
        return {name: value for name, value in means.items() if name.startswith("actor/mtp/")}


class RewardTrainer(SupervisedTrainer):
    """Trains the reward model on preference pairs. `fit` saves a checkpoint at the end."""

    phase = "reward"
    section = "reward_training"
    name = "reward"
    title = "reward model"
    load = ModelWorker.load
    train = ModelWorker.pair_step
    saves_end = True

    def also(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return all means except the loss."""
        return {name: value for name, value in means.items() if name != "loss"}


async def pair_accuracy(model: Role, dataset: PreferenceDataset) -> dict[str, float]:
    """Return the fraction of pairs whose chosen answer has the higher score, and the mean score
    difference."""
    differences = []
    for start in range(0, len(dataset), _SCORED_AT_ONCE):
        batch = dataset.batch(np.arange(start, min(start + _SCORED_AT_ONCE, len(dataset))))
        chosen = await _scores(model, batch, "chosen_ids")
        rejected = await _scores(model, batch, "rejected_ids")
        differences.append(chosen - rejected)
    difference = np.concatenate(differences)
    return {"accuracy": float((difference > 0).mean()), "margin": float(difference.mean())}


async def _scores(model: Role, batch: DataProto, name: str) -> np.ndarray:
    rows = DataProto.from_columns(
        {"prompt_ids": batch.jagged("prompt_ids"), "response_ids": batch.jagged(name)}
    )
    return np.asarray((await model.compute(ModelWorker.compute_scores, rows))["rm_scores"])
