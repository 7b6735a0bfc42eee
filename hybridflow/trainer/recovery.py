"""Recovery from lost training ranks within the same process: the ranks are restarted, and the loop
rolls back to a checkpoint.
"""

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
    """Run `trainer.fit()`. If a group loses ranks, restart all groups, return the trainer to the
    last checkpoint, and continue.

    All groups are restarted, because a run without a checkpoint starts over from the ranks' initial
    weights.

    Args:
        trainer: the loop.
        groups: {role: training ranks}.
        max_restarts: maximum number of restarts per hour; if 0, the first loss ends the job.
        progress: reports each restart.

    Raises:
        HybridFlowError: the loop's error, if no ranks are lost (so that a restart would not help)
            or `max_restarts` is used up; or an error during a restart.
    """
    limit = RestartLimit(max_restarts)
    while True:
        try:
            return await trainer.fit()
        # not only WorkerError: a peer may have noticed first, such as an engine that was receiving
        # weights
        except HybridFlowError as error:
            lost = " and ".join(role for role, group in groups.items() if not group.is_alive())
            if not lost or not limit.take():
                raise
            # the log file gets the tail of the rank's log, the terminal only the first line
            log.info(
                "step %d: lost ranks of %s (%d more restarts): %s",
                trainer.step,
                lost,
                limit.left,
                error,
            )
            reason = str(error).splitlines()[0]
        progress.message(f"step {trainer.step}: {reason}")
        # before the restart, so that nothing else reaches the new ranks
        await trainer.devices.forget()
        with progress.stage(f"restart the ranks of {' and '.join(groups)}"):
            # engines that are lost too have already dropped all requests
            with suppress(HybridFlowError):
                # the ranks will query the engines, which must be idle
                await trainer.samples.forget()
                for learner in trainer.learners.values():
                    await learner.engines.forget()
            for group in groups.values():
                await group.restart()
        await trainer.go_back()
        progress.message(f"continuing after step {trainer.step}")
