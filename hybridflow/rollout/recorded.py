"""Recorded pairs of answers in place of groups that engines answer: a step reads its batch and
generates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import RunConfig
from hybridflow.data.custom import open_sampler
from hybridflow.data.dataset import PreferenceDataset
from hybridflow.data.micro_batches import RESPONSE_MASK
from hybridflow.dispatch import DataflowStep
from hybridflow.errors import FlowError
from hybridflow.workers.model_role import interleave_pairs

READING = DataflowStep(
    "read pairs",
    (),
    ("uid", "prompt_ids", "response_ids", RESPONSE_MASK, "scores", "finish_reason"),
)


class RecordedPairs:
    """The samples of a run with `data.answers=pairs` (`trainer.samples.Samples`)."""

    def __init__(
        self, config: RunConfig, dataset: PreferenceDataset, keep: Callable[[DataProto], DataProto]
    ) -> None:
        self.dataset = dataset
        self.keep = keep
        self.sampler = open_sampler(config.data, dataset, config.seed)
        self._first = self.state()
        self.metrics: Mapping[str, float] = {}
        self.num_rows = len(dataset)

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """The two answers to each of `data.train_batch_size` prompts, chosen before rejected, with
        the scores 1 and 0, whatever a reward would say; `uid` tells the pairs apart."""
        if greedy:
            raise FlowError("samples(greedy=True): no engine answers, as the answers are recorded")
        pairs = self.dataset.batch(next(self.sampler))
        rows = interleave_pairs(pairs)
        count = len(pairs)
        responses = rows.jagged("response_ids")
        return self.keep(
            rows.with_columns(
                uid=np.repeat(np.arange(count, dtype=np.int64), 2),
                index=np.repeat(pairs["index"], 2),
                scores=np.tile(np.array([1.0, 0.0], np.float32), count),
                finish_reason=np.array(["stop"] * (2 * count), dtype=object),
                **{
                    RESPONSE_MASK: Jagged(
                        np.ones(len(responses.values), np.bool_), responses.offsets
                    )
                },
            )
        )

    def last_after(self, step: int) -> int | None:
        """Pairs have no end: they come again in the next epoch."""
        return None

    def dump(self, folder: Path, step: int, batch: DataProto) -> None:
        """Write nothing: the pairs are in a file."""

    async def forget(self) -> None:
        """Nothing is handed out."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs, JSON-able."""
        return {"sampler": self.sampler.state()}

    async def begun(self) -> None:
        """No answer is under way."""

    async def restore(
        self, state: Mapping[str, Any] | None, begun: DataProto | None = None, version: int = 0
    ) -> None:
        """Go on where `state` was taken, or without it at the first pair. CheckpointError: the
        dataset or its order is another one."""
        self.sampler.restore((state or self._first)["sampler"])
