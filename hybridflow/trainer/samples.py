"""The samples that each step trains on: answers of engines with their scores, those of a dump, or
recorded pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.data.custom import COLUMNS, Prompts
from hybridflow.observe.timeline import Timeline
from hybridflow.rollout.answering import Prompt, samples
from hybridflow.rollout.dumps import Dumps, dump_batch
from hybridflow.rollout.evaluation import Scorer, with_failures, without_failed
from hybridflow.rollout.groups import Groups
from hybridflow.rollout.protocols import Rollouts
from hybridflow.rollout.sampling_control import DynamicSampling, without_overlong
from hybridflow.trainer.advantages import lost_parts


class Samples(Protocol):
    """Where a run's samples come from."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the samples that were taken last."""

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """The samples of the step: prompts, responses and scores; with `greedy` greedy_scores."""

    async def of_prompts(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """`n` samples of each of these prompts, which are no rows of the dataset."""

    def last_after(self, step: int) -> int | None:
        """The last step that there are samples for; None where there is no end."""

    def keep(self, batch: DataProto) -> DataProto:
        """Move token columns that the driver has made to where workers read them."""

    def dump(self, folder: Path, step: int, batch: DataProto) -> None:
        """Write the samples of a step for people, and for a run that trains on them."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs, JSON-able."""

    async def begun(self) -> DataProto | None:
        """Answers that go on, to be taken together with `state`."""

    async def restore(
        self, state: Mapping[str, Any] | None, begun: DataProto | None = None, version: int = 0
    ) -> None:
        """Go on where `state` was taken, or without it from the beginning."""

    async def forget(self) -> None:
        """Give up what was begun."""


class Sampled:
    """Answers of engines with their scores: of one batch of prompts, or with
    `algorithm.dynamic_sampling` of several.

    Args:
        keep: moves token columns that the driver makes to where workers and engines read them.
        made_with: `rollout.dumps.identity` of this run.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Rollouts,
        dataset: Prompts,
        scorer: Scorer,
        timeline: Timeline,
        keep: Callable[[DataProto], DataProto] = lambda batch: batch,
        made_with: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.engines = engines
        self.scorer = scorer
        self.timeline = timeline
        self.groups = Groups(config, engines, dataset, keep, scorer)
        self.num_rows = len(dataset)
        self.keep = keep
        self.made_with = made_with
        self.state = self.groups.state
        self.begun = self.groups.begun
        self.forget = self.groups.forget
        self.restore = self.groups.restore
        self._dynamic: Mapping[str, float] = {}

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of dynamic sampling and of the groups."""
        return {**self._dynamic, **self.groups.metrics}

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """`Samples.take`."""
        collected = DynamicSampling(self.config)
        batch = None
        while batch is None:
            with self.timeline.phase("gen"):
                answered = await self.groups.next_batch(step - 1)
            # what is left of it: groups are scored from when they have ended
            with self.timeline.phase("reward"):
                batch = collected.add(self._counted(answered.union(await self.groups.scores())))
        self._dynamic = collected.metrics
        return await self._with_greedy_scores(batch) if greedy else batch

    async def of_prompts(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """`Samples.of_prompts`."""
        data = self.config.data
        return self.keep(await samples(self.engines, self.scorer.tokenizer, data, prompts, n))

    def last_after(self, step: int) -> int | None:
        """`Samples.last_after`."""
        return None

    def dump(self, folder: Path, step: int, batch: DataProto) -> None:
        """`Samples.dump`."""
        dump_batch(folder, step, batch, self.scorer.tokenizer, self.made_with)

    def _counted(self, batch: DataProto) -> DataProto:
        """Leaves out rows whose scores do not count."""
        lost = lost_parts(self.config, batch)
        if any(lost):
            batch = with_failures(batch, lost)
            self.scorer.check_failures(batch)
        batch = without_failed(batch, self.config.reward.on_failure)
        return without_overlong(batch) if self.config.algorithm.overlong_filter else batch

    async def _with_greedy_scores(self, batch: DataProto) -> DataProto:
        """Adds greedy_scores [B] f32: the weighted score of the most likely answer to the prompt of
        each row."""
        _, first, group = np.unique(batch["uid"], return_index=True, return_inverse=True)
        prompts = batch.rows(first).select(["uid", *COLUMNS])
        with self.timeline.phase("gen_greedy"):
            answered = prompts.union(
                await self.engines.answers(self.engines.begin(prompts, training=False))
            )
        scores = (await self.scorer.score(answered))["scores"] * np.float32(
            self.config.reward.weight
        )
        return batch.with_columns(greedy_scores=scores[group])


class Dumped(Sampled):
    """The samples of an earlier run's dumps, in place of answers."""

    def __init__(self, dumps: Dumps, *given: Any) -> None:
        """`given`: the arguments of `Sampled`."""
        super().__init__(*given)
        self.dumps = dumps

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """`Samples.take`."""
        batch = self.keep(self.dumps.batch(step))
        if greedy and "greedy_scores" not in batch:
            return await self._with_greedy_scores(batch)
        return batch

    def last_after(self, step: int) -> int | None:
        """`Samples.last_after`."""
        return self.dumps.last_after(step)
