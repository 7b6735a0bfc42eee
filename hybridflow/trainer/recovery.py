"""Recovery in the same process when ranks that train are lost: they start again and the loop goes
back to a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from hybridflow.errors import HybridFlowError
from hybridflow.observe.progress import Progress
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.single_controller import WorkerGroup
from hybridflow.trainer.loop import RLTrainer

log = logging.getLogger(__name__)


async def fit_with_restarts(
    trainer: RLTrainer, groups: Mapping[str, WorkerGroup], max_restarts: int, progress: Progress
) -> None:
    """`trainer.fit()`; when a group breaks, restart all, take the trainer back to the last
    checkpoint and fit again.

    All are restarted since a run without a checkpoint begins anew, from the weights that ranks have
    at their start.

    Args:
        trainer: the loop.
        groups: by role, the ranks that train.
        max_restarts: how many times within an hour; 0 lets the first loss end the job.
        progress: told about each restart.

    Raises:
        HybridFlowError: the error of the loop, when the groups are whole (then a restart would not
            help) or `max_restarts` are used up; or what went wrong in a restart.
    """
    limit = RestartLimit(max_restarts)
    while True:
        try:
            return await trainer.fit()
        # not WorkerError alone: a peer may have noticed first, an engine that was receiving
        # weights, say
        except HybridFlowError as error:
            lost = " and ".join(role for role, group in groups.items() if not group.is_alive())
            if not lost or not limit.take():
                raise
            # into the log file with the tail of the rank's log; the terminal gets the first line
            log.info(
                "step %d: lost ranks of %s (%d more restarts): %s",
                trainer.step,
                lost,
                limit.left,
                error,
            )
            reason = str(error).splitlines()[0]
        progress.message(f"step {trainer.step}: {reason}")
        # before they start again: nothing else is to reach the new ranks
        await trainer.devices.forget()
        with progress.stage(f"start the ranks of {' and '.join(groups)} again"):
            # engines that are lost as well have given everything up
            with suppress(HybridFlowError):
                # the ranks will look into engines, which must be idle for it
                await trainer.samples.forget()
                for learner in trainer.learners.values():
                    await learner.engines.forget()
            for group in groups.values():
                await group.restart()
        await trainer.go_back()
        progress.message(f"going on after step {trainer.step}")
