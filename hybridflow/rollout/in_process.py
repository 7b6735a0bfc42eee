"""The loop's rollout service and weight sync over an engine in the trainer's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.engines.base import LocalEngine
from hybridflow.rollout.protocols import ROOM, SyncReport
from hybridflow.single_controller import waiting
from hybridflow.workers.rollout import response_columns

if TYPE_CHECKING:
    import torch


class InProcessRollouts:
    """`RolloutService` and `WeightSync`: a call of the engine each, in the caller's thread.

    Args:
        engine: a started one.
        copy_weights: writes the policy's present weights into the tensors that it is given; returns the bytes.
        stop_ids: tokens that end a response.
    """

    def __init__(
        self,
        engine: LocalEngine,
        copy_weights: Callable[[Mapping[str, torch.Tensor]], int],
        config: RunConfig,
        stop_ids: Sequence[int],
    ) -> None:
        self.engine, self.config, self.stop_ids = engine, config, list(stop_ids)
        self._copy_weights = copy_weights

    def generate(self, prompts: DataProto, *, training: bool) -> DataProto:
        """Answer the prompts."""
        rollout, limit = self.config.rollout, self.config.data.max_response_length
        sampling = rollout.sampling if training else rollout.val_sampling
        limit = int(prompts[ROOM].max()) if ROOM in prompts else limit
        rows = [row.tolist() for row in prompts.jagged("prompt_ids")]
        with waiting():
            completions = self.engine.generate(rows, sampling, limit, self.stop_ids)
        return response_columns(completions)

    def sync(self, version: int) -> SyncReport:
        """Copy the weights into the engine's tensors."""
        started = time.perf_counter()
        nbytes = self.engine.take(str(version), self._copy_weights)
        return SyncReport(version, time.perf_counter() - started, nbytes, {})

    def sleep(self) -> None:
        """Have the engine give its memory back."""
        self.engine.sleep()

    def wake(self, tags: Sequence[str]) -> None:
        """Have the engine take the memory of these parts again."""
        self.engine.wake(tags)
