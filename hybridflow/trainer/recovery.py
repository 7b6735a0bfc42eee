"""Carrying on in the same process when ranks of the policy are lost: the group starts again and the loop goes back to a
checkpoint."""

from __future__ import annotations

import logging
from typing import Protocol

from hybridflow.errors import HybridFlowError
from hybridflow.observe.progress import Progress
from hybridflow.trainer.loop import RLTrainer

log = logging.getLogger(__name__)


class Restartable(Protocol):
    """What is asked of a worker group; its hooks (`on_restart`) bring the state back."""

    def is_alive(self) -> bool:
        """Whether every rank still runs."""
        ...

    def restart(self) -> None:
        """Start all ranks again, then run the hooks."""
        ...


def fit_with_restarts(trainer: RLTrainer, group: Restartable, max_restarts: int, progress: Progress) -> None:
    """`trainer.fit()`; when the group breaks, restart it (its hooks take the trainer back to the last checkpoint) and
    fit again.

    Args:
        trainer: the loop.
        group: the policy's ranks, with `trainer.go_back` among the hooks.
        max_restarts: how many times in this process; 0 lets the first loss end the job.
        progress: told about each restart.

    Raises:
        HybridFlowError: the error of the loop, when the group is whole (then a restart would not help) or
        `max_restarts` are used up;
            or what went wrong in a restart.
    """
    left = max_restarts
    while True:
        try:
            return trainer.fit()
        except (
            HybridFlowError
        ) as error:  # of another type where a peer noticed first: an engine that was receiving weights, say
            if left < 1 or group.is_alive():
                raise
            left -= 1
            log.warning(
                "the policy's group broke in step %d and is started again (%d more times): %s",
                trainer.step,
                left,
                error,
            )
            reason = str(error).splitlines()[0]
        progress.message(f"step {trainer.step}: {reason}")
        with progress.stage("start the Megatron ranks again"):
            group.restart()
        progress.message(f"going on after step {trainer.step}")
