"""Supervised fine-tuning: the warm start of a run, or a job of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridflow.config.schema import SftConfig
from hybridflow.data.dataset import SftDataset
from hybridflow.data.sampler import ResumableSampler
from hybridflow.errors import HybridFlowError
from hybridflow.saving.store import Checkpoint
from hybridflow.trainer.protocols import Role
from hybridflow.trainer.session import Session
from hybridflow.workers.policy import PolicyWorker


class SftTrainer:
    """`config.steps` updates on demonstrations."""

    def __init__(self, config: SftConfig, session: Session, policy: Role, dataset: SftDataset, seed: int) -> None:
        self.config, self.session, self.policy, self.dataset = config, session, policy, dataset
        self.sampler = ResumableSampler(len(dataset), config.batch_size, True, seed)
        self.step = 0

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on after a checkpoint of this phase."""
        self.policy.run(PolicyWorker.load, checkpoint.policy, self.config.optim)
        self.sampler.restore(checkpoint.state["sampler"])
        self.step = checkpoint.step

    def fit(self, on_step: Callable[[], None] = lambda: None) -> None:
        """Run all remaining steps. `on_step` is called between steps, for example to notice an engine that failed to
        start."""
        session, every = self.session, self.session.config.trainer.save_every_steps
        if self.step == 0:
            self.policy.run(PolicyWorker.set_optimizer, self.config.optim)
        with (
            session.timed("seconds_sft"),
            session.progress(self.config.steps, "SFT", self.step, throttle_s=5.0) as progress,
        ):
            while self.step < self.config.steps:
                started = time.perf_counter()
                [update] = self.policy.update(PolicyWorker.sft_step, self.dataset.batch(next(self.sampler)))
                self.step += 1
                loss = update.means.get("loss", float("nan"))
                if session.config.actor.on_nonfinite == "stop" and not update.applied:
                    raise HybridFlowError(
                        f"SFT step {self.step}: the gradient is not finite (loss {loss}); lower sft.optim.lr"
                    )
                seconds = time.perf_counter() - started
                metrics = {"sft/loss": loss, "sft/grad_norm": update.grad_norm, "sft/lr": update.lr}
                session.tracker.log(self.step, metrics | {"timing_s/step": seconds}, phase="sft")
                progress.update(self.step, {"loss": loss}, {"step": seconds})
                on_step()
                session.store.check()
                if (session.is_due(every, self.step) or session.stop_asked) and self.step < self.config.steps:
                    self.save()
                    session.stop_if_asked()

    def save(self) -> Path:
        """Checkpoint this phase."""
        state: dict[str, Any] = {"sampler": self.sampler.state(), "totals": self.session.totals_now()}
        return self.session.store.save("sft", self.step, state, self.policy)
