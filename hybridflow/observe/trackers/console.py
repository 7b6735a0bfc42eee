"""The console: one line a step with the metrics that people look for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybridflow.observe.trackers.base import Phase, tracker

# In the order of the line; a phase with none of them shows all its metrics.
CONSOLE_KEYS = (
    "critic/score/mean",
    "val/score",
    "sft/loss",
    "reward/loss",
    "reward/accuracy",
    "actor/pg_loss",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "response_length/mean",
    "rollout/logprob_diff/mean",
    "timing_s/step",
    "sft/grad_norm",
    "sft/lr",
)


@tracker("console")
class ConsoleTracker:
    """Prints a line for each step. Runs with a progress display leave it out: the display shows the
    same."""

    def __init__(self, run_dir: Path) -> None:
        """The run folder is not used."""

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Print a line."""
        of_sets = (
            name
            for name in metrics
            if name.startswith("val-") and name.count("/") == 1 and "/score" in name
        )
        shown = [*(name for name in CONSOLE_KEYS if name in metrics), *of_sets] or list(metrics)
        print(
            f"{phase} step {step}  " + "  ".join(f"{name} {metrics[name]:.4g}" for name in shown),
            flush=True,
        )

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Nothing: printed lines stay."""

    def close(self) -> None:
        """Nothing is open."""
