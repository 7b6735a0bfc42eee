"""The console tracker: one line per step with the main metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybridflow.observe.trackers.base import Phase, tracker

# in display order; a phase that has none of these shows all its metrics
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


@tracker("console", in_driver=True)
class ConsoleTracker:
    """Prints a line for each step. Not used with a progress display, which shows the same data."""

    def __init__(self, run_dir: Path) -> None:
        """Create the tracker. `run_dir` is ignored."""

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
        """Do nothing, because printed lines cannot be removed."""

    def close(self) -> None:
        """Do nothing, because there is no open file."""
