"""Going on in the same step when no engine is left: engines and their workers start again and take
the same weights.

The policy has not moved since the last sync, so the same version goes to the new engines, and what
the lost ones had not ended is asked again. While another engine can answer, `EngineGroup` asks that
one instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.rollout.protocols import SyncReport, WeightSync
from hybridflow.rollout.service import EngineGroup

log = logging.getLogger(__name__)


class RestartingSync:
    """`WeightSync` to engines that start again when none is left, in a sync or while they answer
    (`recover`).

    Args:
        engines, weights: the engines, and the sync that is called.
        max_restarts: how many times within an hour; 0 lets the first loss end the job.
        told: about each restart, in one line.
    """

    def __init__(
        self,
        engines: EngineGroup,
        weights: WeightSync,
        max_restarts: int,
        told: Callable[[str], None],
    ) -> None:
        self.engines = engines
        self.weights = weights
        self._told = told
        self._restarts = RestartLimit(max_restarts)
        self._version = -1
        engines.recover = self.recover
        engines.weights = self

    async def recover(self, error: HybridFlowError) -> None:
        """After engines or workers were lost while they answered: bring them back with the weights
        of the last sync.

        Raises:
            HybridFlowError: the loss, when `max_restarts` are used up; or what went wrong in a
                restart: engines have `rollout.start_timeout_s` to come up.
        """
        if self._version < 0 or (isinstance(error, WorkerError) and self.engines.workers_alive()):
            raise error
        await self._restart(error)
        await self.weights.sync(self._version)  # waits for engines that are starting

    async def sync(self, version: int) -> SyncReport:
        """Bring the weights to the engines. Workers that are lost start again; `weights` handles
        the loss of an engine alone."""
        self._version = version
        while True:
            try:
                return await self.weights.sync(version)
            except WorkerError as error:
                if self.engines.workers_alive():  # a rank of the policy, then
                    raise
                await self._restart(error)

    async def _restart(self, error: HybridFlowError) -> None:
        """Start lost workers again; raise `error` when no more restarts are allowed."""
        if not self._restarts.take():
            raise error
        log.info(
            "no engine is left; they start again (%d more times this hour): %s",
            self._restarts.left,
            error,
        )
        self._told(str(error).splitlines()[0])
        if not self.engines.workers_alive():
            await self.engines.restart_workers()
