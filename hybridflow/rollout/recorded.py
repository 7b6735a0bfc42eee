"""Training on recorded pairs of answers: a step reads its batch from the dataset instead of
generating it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import RunConfig
from hybridflow.data.custom import open_sampler
from hybridflow.data.dataset import PreferenceDataset
from hybridflow.data.packing import RESPONSE_MASK
from hybridflow.dispatch import DataflowStep
from hybridflow.errors import FlowError
from hybridflow.rollout.answering import Prompt
from hybridflow.workers.model_role import interleave_pairs

READING = DataflowStep(
    "read pairs",
    (),
    ("uid", "prompt_ids", "response_ids", RESPONSE_MASK, "scores", "finish_reason"),
)


class RecordedPairs:
    """Implementation of `trainer.samples.Samples` for a run with `data.answers=pairs`."""

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
        """Return both answers to each of `data.train_batch_size` prompts: the chosen one with score
        1, followed by the rejected one with score 0. Both answers of a pair have the same `uid`.
        """
        if greedy:
            raise FlowError(
                "samples(greedy=True): the answers are recorded, so there is no engine "
                "to sample from"
            )
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

    async def of_prompts(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """Raise FlowError, because flows cannot generate answers if they are recorded."""
        raise FlowError("generate(...): the answers are recorded (data.answers=pairs)")

    def last_after(self, step: int) -> int | None:
        """Return None, because pairs repeat every epoch and there is no last step."""
        return None

    def dump(self, folder: Path, step: int, batch: DataProto) -> None:
        """Do nothing, because the pairs are already in a file."""

    async def forget(self) -> None:
        """Do nothing, because no prompt is in flight."""

    def state(self) -> dict[str, Any]:
        """Return a JSON-serializable state for `restore`."""
        return {"sampler": self.sampler.state()}

    async def begun(self) -> None:
        """Return None, because no answer is in flight."""

    async def restore(
        self, state: Mapping[str, Any] | None, begun: DataProto | None = None, version: int = 0
    ) -> None:
        """Continue from `state`, or from the first pair if it is None. Raises CheckpointError if
        the dataset or its order is different."""
        self.sampler.restore((state or self._first)["sampler"])
