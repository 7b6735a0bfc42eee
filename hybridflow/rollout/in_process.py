"""Rollout service and weight sync for an engine in the trainer's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.engines.base import LocalEngine, prompt_images
from hybridflow.errors import EngineError
from hybridflow.rollout.protocols import SyncReport
from hybridflow.rollout.requests import Requests, extras_for
from hybridflow.single_controller import computing
from hybridflow.workers.requests import generated
from hybridflow.workers.rollout import response_columns

if TYPE_CHECKING:
    import torch


class InProcessRollouts(Requests):
    """`Rollouts` and `WeightSync` for one engine that runs in the driver's thread while answers are
    awaited.

    Args:
        engine: a started engine.
        copy_weights: writes the policy's current weights into the given tensors; returns the bytes
            copied.
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
        self.engine = engine
        self.stop_ids = list(stop_ids)
        self._copy_weights = copy_weights
        self._asked: list[tuple[bool, DataProto]] = []

    async def sync(self, version: int) -> SyncReport:
        """Copy the policy's weights into the engine's tensors."""
        started = time.perf_counter()
        nbytes = self.engine.take(str(version), self._copy_weights)
        return SyncReport(version, time.perf_counter() - started, nbytes, {})

    async def sleep(self) -> None:
        """Release the engine's memory."""
        self.engine.sleep()

    async def wake(self, tags: Sequence[str]) -> None:
        """Reallocate the engine's memory for the given parts."""
        self.engine.wake(tags)

    # ---- the engine interface of `Requests`

    def _serving(self) -> Sequence[int]:
        return [0]

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        self._asked += [(training, part) for part in parts.values()]

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        """Run the oldest batch of requests. With tail batching, run only as many requests as the
        engine handles concurrently, so that no time is spent on requests that will be aborted.
        """
        kinds = [asked_training for asked_training, _ in self._asked]
        if training not in kinds:
            return []
        number = kinds.index(training)
        _, part = self._asked.pop(number)
        slots = self.config.rollout.max_running_requests
        if self.config.trainer.tail_batching and len(part) > slots:
            rest = part.rows(np.arange(slots, len(part)))
            self._asked.insert(number, (training, rest))
            part = part.rows(np.arange(slots))
        sampling = self._sampling(training, part)
        rows = [row.tolist() for row in part.jagged("prompt_ids")]
        extras = extras_for(self.config, training)
        with computing():
            most = int(part["max_new_tokens"].max())
            completions = generated(
                self.engine, rows, sampling, most, self.stop_ids, extras, prompt_images(part)
            )
        return [response_columns(completions, extras).with_columns(ticket=part["ticket"])]

    async def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        return []  # the engine runs only inside `_collect`, so nothing is in flight

    async def _leave_out_lost(self, answers: int) -> None:
        raise EngineError(f"the engine in this process interrupted {answers} answers")

    async def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        wanted = [ticket for part in tickets.values() for ticket in part]
        asked = self._asked
        self._asked = []
        for training, part in asked:
            stays = np.flatnonzero(~np.isin(part["ticket"], wanted))
            if len(stays):
                self._asked.append((training, part.rows(stays)))

    async def _forget(self, engines: Sequence[int]) -> None:
        self._asked = []
