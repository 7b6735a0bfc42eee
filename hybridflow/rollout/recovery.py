"""Recovery within a step when no engine is left. The engines and their workers are restarted, and
unfinished requests are resent. Because the policy has not changed since the last sync, the new
engines get the same weight version. As long as another engine is alive, `EngineGroup` uses that
engine instead.
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
    """A `WeightSync` that restarts the engines if all of them are lost, during a sync or (through
    `recover`) during generation.

    Args:
        engines: the engines.
        weights: the wrapped sync.
        max_restarts: maximum number of restarts per hour; if 0, the first loss ends the job.
        told: callback that receives a one-line message for each restart.
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
        """Restart engines or workers that were lost while generating, and send them the weights of
        the last sync.

        Raises:
            HybridFlowError: `error` itself if `max_restarts` is used up, or an error during a
                restart. Engines must start within `rollout.start_timeout_s`.
        """
        if self._version < 0 or (isinstance(error, WorkerError) and self.engines.workers_alive()):
            raise error
        await self._restart(error)
        await self.weights.sync(self._version)  # waits for engines that are starting

    async def sync(self, version: int) -> SyncReport:
        """Transfer the weights to the engines. Lost workers are restarted; `weights` handles the
        loss of single engines."""
        self._version = version
        while True:
            try:
                return await self.weights.sync(version)
            except WorkerError as error:
                if self.engines.workers_alive():  # a rank of the policy was lost instead
                    raise
                await self._restart(error)

    async def _restart(self, error: HybridFlowError) -> None:
        """Restart lost workers. Raises `error` if no more restarts are allowed."""
        if not self._restarts.take():
            raise error
        log.info(
            "no engine is left; restarting all engines (%d more restarts allowed this hour): %s",
            self._restarts.left,
            error,
        )
        self._told(str(error).splitlines()[0])
        if not self.engines.workers_alive():
            await self.engines.restart_workers()
