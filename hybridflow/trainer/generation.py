"""Startup, use and shutdown of a job's engines, in separate processes or in the trainer's
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.engines.base import ENGINES, LocalEngine
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.observe.progress import Progress
from hybridflow.rollout.conversations import conversing
from hybridflow.rollout.in_process import InProcessRollouts
from hybridflow.rollout.protocols import Engines, Sample, SyncReport
from hybridflow.rollout.service import EngineGroup
from hybridflow.rollout.weight_sync import RestartingSync, SliceSync
from hybridflow.single_controller import InProcessGroup, WorkerGroup, block_on
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.rollout import engine_spec

if TYPE_CHECKING:
    from torch import Tensor

First = TypeVar("First")
Second = TypeVar("Second")
_STOP_S = 10.0
# methods that a run in one process calls on its engine
_LOCAL = ("start", "stop", "generate", "take", "sleep", "wake")


class Generation(Protocol):
    """Engines that are being started."""

    async def check_starting(self) -> None:
        """Raise if an engine has failed to start; otherwise return immediately."""

    def connect(
        self,
        policy: WorkerGroup | InProcessGroup,
        tokenizer: Tokenizer,
        logs: Path,
        role: str = "actor",
    ) -> Engines:
        """Return the interface used by the loop. Call it once the policy's ranks exist. `role` is
        the policy's name within its processes; `logs` is the folder for the environments'
        output."""

    async def wait_ready(self, progress: Progress) -> None:
        """Wait until the engines serve requests and can receive weights."""

    async def stop(self) -> None:
        """Stop the engines."""


class NoEngines:
    """Stand-in for engines in a run that trains on dumps. It generates nothing, is always ready,
    and ignores weight syncs.
    """

    def connect(
        self,
        policy: WorkerGroup | InProcessGroup,
        tokenizer: Tokenizer,
        logs: Path,
        role: str = "actor",
    ) -> Engines:
        """Return this object as the interface used by the loop."""
        return self

    async def sync(self, version: int) -> SyncReport:
        """Send nothing."""
        return SyncReport(version, 0.0, 0, {})

    async def load_metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    async def nothing(self, *_: object, **__: object) -> None:
        """Do nothing, because there are no engines to act on."""

    check_starting = wait_ready = stop = advance = begun = abort = forget = sleep = wake = close = (
        nothing
    )

    def begin(
        self, prompts: DataProto, *, training: bool, begun: DataProto | None = None
    ) -> Sequence[Sample]:
        """Raise HybridFlowError, because there are no engines."""
        raise HybridFlowError(
            "trainer.rollouts_from is set, so this run has no engines to generate answers"
        )

    async def answers(self, samples: Sequence[Sample]) -> DataProto:
        """Raise HybridFlowError, because there are no requests."""
        return self.shown(samples)

    def shown(self, samples: Sequence[Sample]) -> DataProto:
        """Raise HybridFlowError, because there are no requests."""
        raise HybridFlowError("trainer.rollouts_from is set, so this run has no generated answers")


class EngineProcesses:
    """Engines in separate processes, managed by workers.

    Args:
        workers, others: see `EngineGroup`.
        told: called with a one-line message whenever all engines are restarted.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        others: WorkerGroup | None,
        config: RunConfig,
        stop_ids: Sequence[int],
        told: Callable[[str], None],
    ) -> None:
        self.workers = workers
        self.config = config
        self._told = told
        self.engines = EngineGroup(workers, config, stop_ids, others)
        self._weights: SliceSync | None = None

    def give_way(self, progress: Progress) -> EngineProcesses:
        """If the trainer's ranks share devices with the engines, wait until the engines have
        started and released these devices.
        """
        if derived.alternates(self.config):
            with progress.stage("wait for the engines to start and to release the GPUs"):
                block_on(self.engines.wait_ready())
                block_on(self.engines.sleep())
        return self

    async def check_starting(self) -> None:
        """Raise if an engine has failed to start."""
        await self.engines.check_starting()

    def connect(
        self,
        policy: WorkerGroup | InProcessGroup,
        tokenizer: Tokenizer,
        logs: Path,
        role: str = "actor",
    ) -> Engines:
        """Connect the engines to the policy's ranks, which will send them weight slices, and return
        the engines. If all engines are lost, they are restarted.
        """
        assert isinstance(policy, WorkerGroup)
        self._weights = weights = SliceSync(policy, self.engines, self.config, role)
        policy.on_restart(weights.reconnect)
        self.workers.on_restart(self.engines.begin_again)
        self.workers.on_restart(weights.reconnect)
        RestartingSync(self.engines, weights, self.config.trainer.max_restarts, self._told)
        return conversing(self.engines, tokenizer, self.config, logs)

    async def wait_ready(self, progress: Progress) -> None:
        """Wait for the engines, then plan and verify the weight transfer."""
        assert self._weights is not None
        with progress.stage("wait for the engines"):
            await self.engines.wait_ready()
        if derived.alternates(self.config):
            await self.engines.wake(("weights",))
        with progress.stage("plan the weight sync"):
            plan = await self._weights.prepare()
        progress.message(plan)

    async def stop(self) -> None:
        """Stop the engines."""
        await self.engines.stop()


class EngineHere:
    """One engine in the trainer's process. It copies the policy's weights directly."""

    def __init__(
        self, config: RunConfig, folder: Path, log_dir: Path, stop_ids: Sequence[int]
    ) -> None:
        """Start the engine.

        Args:
            folder: folder with the model and the tokenizer.
        """
        self.config = config
        self.stop_ids = stop_ids
        spec = engine_spec(config.rollout, 0, folder, config.model.dtype, config.seed, False)
        made = ENGINES.get(config.rollout.engine)(spec, log_dir / f"{spec.name}.log", lambda: None)
        if missing := [name for name in _LOCAL if not callable(getattr(made, name, None))]:
            raise ConfigError(
                f"rollout.engine={config.rollout.engine} lacks {', '.join(missing)}, which an "
                "engine in the trainer's process requires (hybridflow.engines.base.LocalEngine); "
                "add them, or set cluster.in_process=false"
            )
        self.engine = cast(LocalEngine, made)
        self.engine.start()

    async def check_starting(self) -> None:
        """Return immediately: the engine was started on construction."""

    def connect(
        self,
        policy: WorkerGroup | InProcessGroup,
        tokenizer: Tokenizer,
        logs: Path,
        role: str = "actor",
    ) -> Engines:
        """Return the interface through which the loop calls the engine and copies the policy's
        tensors to it.
        """

        def copy(target: object) -> int:
            return int(policy.run(PolicyWorker.copy_weights, target, role=role))

        return conversing(self.filled_by(copy), tokenizer, self.config, logs)

    def filled_by(self, copy: Callable[[Mapping[str, Tensor]], int]) -> InProcessRollouts:
        """Return the request interface of the engine. At each sync, `copy` writes the weights into
        the given tensors and returns the number of bytes copied.
        """
        return InProcessRollouts(self.engine, copy, self.config, self.stop_ids)

    async def wait_ready(self, progress: Progress) -> None:
        """Return immediately: the engine is ready, and no transfer needs to be planned."""

    async def stop(self) -> None:
        """Stop the engine."""
        self.engine.stop()


def start_both(
    first: Callable[[], First], second: Callable[[], Second], *, at_once: bool
) -> tuple[First, Second]:
    """Call both functions and return their results. If `at_once` is True, `first` runs concurrently
    in a thread; it spends most of its time waiting for processes.
    """
    if not at_once:
        return first(), second()
    begun = (threads := ThreadPoolExecutor(1, "start")).submit(first)
    threads.shutdown(wait=False)
    try:
        found = second()
    except BaseException:
        # Ray aborts the process if a thread calls it after shutdown
        wait([begun], _STOP_S)
        raise
    return begun.result(), found
