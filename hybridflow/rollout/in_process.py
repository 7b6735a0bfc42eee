"""The loop's rollout service and weight sync over an engine in the trainer's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.engines.asking import generated
from hybridflow.engines.base import Completion, LocalEngine
from hybridflow.errors import EngineError
from hybridflow.rollout.protocols import SyncReport
from hybridflow.rollout.requests import Requests, extras_for, sampling_for
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
        self._copy_weights, self.sleep, self.wake = copy_weights, engine.sleep, engine.wake
        self._asked: list[tuple[bool, DataProto]] = []
        self._aborted: list[DataProto] = []

    def sync(self, version: int) -> SyncReport:
        """Copy the weights into the engine's tensors."""
        started = time.perf_counter()
        nbytes = self.engine.take(str(version), self._copy_weights)
        return SyncReport(version, time.perf_counter() - started, nbytes, {})

    # ---- the one engine, as `Requests` sees it

    def _serving(self) -> Sequence[int]:
        return [0]

    def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        self._asked += [(training, part) for part in parts.values()]

    def _collect(self, training: bool, engines: Sequence[int], wait_s: float) -> Sequence[DataProto]:
        """Answer the requests that were asked together first; with tail batching as many as the engine runs at a time,
        so that what is cut off has not been computed."""
        aborted, self._aborted = self._aborted, []
        number = next((n for n, (asked_training, _) in enumerate(self._asked) if asked_training == training), None)
        if number is None:
            return aborted
        _, part = self._asked.pop(number)
        if self.config.trainer.tail_batching and len(part) > (most := self.config.rollout.max_running_requests):
            self._asked.insert(number, (training, part.rows(np.arange(most, len(part)))))
            part = part.rows(np.arange(most))
        sampling = sampling_for(self.config, training, part)
        rows, extras = [row.tolist() for row in part.jagged("prompt_ids")], extras_for(self.config, training)
        with waiting():
            most = int(part["max_new_tokens"].max())
            completions = generated(self.engine, rows, sampling, most, self.stop_ids, extras)
        return [*aborted, response_columns(completions, extras).with_columns(ticket=part["ticket"])]

    def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        return []  # the engine answers while it is waited for: nothing is under way

    def _leave_out_lost(self, answers: int) -> None:
        raise EngineError(f"{answers} answers were cut short by the engine of this process")

    def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        wanted = [ticket for part in tickets.values() for ticket in part]
        parts = [(training, part, np.isin(part["ticket"], wanted)) for training, part in self._asked]
        self._asked = [(training, part.rows(np.flatnonzero(~hit))) for training, part, hit in parts if not hit.all()]
        training = any(of_training and hit.any() for of_training, _, hit in parts)
        extras = extras_for(self.config, training)
        nothing = response_columns([Completion([], [], "abort", ())] * len(wanted), extras)
        self._aborted.append(nothing.with_columns(ticket=np.array(wanted, np.int64)))

    def _forget(self, engines: Sequence[int]) -> None:
        self._asked, self._aborted = [], []
