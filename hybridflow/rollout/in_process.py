"""The loop's rollout service and weight sync over an engine in the trainer's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.engines.base import LocalEngine
from hybridflow.errors import EngineError
from hybridflow.rollout.protocols import SyncReport
from hybridflow.rollout.requests import Requests
from hybridflow.single_controller import waiting
from hybridflow.workers.rollout import response_columns

if TYPE_CHECKING:
    import torch


class InProcessRollouts(Requests):
    """`RolloutService` and `WeightSync`. The engine computes in the caller's thread, while it waits for answers.

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
        super().__init__(config)
        self.engine, self.stop_ids = engine, list(stop_ids)
        self._copy_weights = copy_weights
        self._asked: list[tuple[bool, DataProto]] = []

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

    # ---- the one engine, as `Requests` sees it

    def _serving(self) -> Sequence[int]:
        return [0]

    def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        self._asked += [(training, part) for part in parts.values()]

    def _collect(self, training: bool, engines: Sequence[int], wait_s: float) -> Sequence[DataProto]:
        """Answer the requests that were asked together first."""
        number = next(number for number, (asked_training, _) in enumerate(self._asked) if asked_training == training)
        _, part = self._asked.pop(number)
        sampling = self.config.rollout.sampling if training else self.config.rollout.val_sampling
        rows = [row.tolist() for row in part.jagged("prompt_ids")]
        with waiting():
            completions = self.engine.generate(rows, sampling, int(part["max_new_tokens"].max()), self.stop_ids)
        return [response_columns(completions).with_columns(ticket=part["ticket"])]

    def _leave_out_lost(self, answers: int) -> None:
        raise EngineError(f"{answers} answers were cut short by the engine of this process")

    def _forget(self, engines: Sequence[int]) -> None:
        self._asked = []
