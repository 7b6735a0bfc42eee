"""Running a job of a checked configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.config.schema import RunConfig


def run_job(job: str, run: RunConfig) -> None:
    """Run a checked configuration as `train`, `sft` or `train-reward`."""
    from hybridflow.config.derived import generates
    from hybridflow.trainer.preload import Preload

    with Preload(run, with_engines=job == "train" and generates(run)) as preload:
        from hybridflow.models.check import check  # torch comes in here, while the servers load what they need

        check(run, job)
        from hybridflow.trainer import app

        if job == "train":
            app.train(run, preload)
        elif job == "sft":
            app.sft(run, preload)
        else:
            app.train_reward(run, preload)
