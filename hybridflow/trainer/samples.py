"""Sources of each step's training samples: scored answers from engines, dumps, or recorded pairs.

Groups with equal scores are replaced (`DynamicSampling`), and truncated answers are excluded. An
excluded sample keeps its row, so that every step has the same number of rows, but its
`response_mask` is cleared, so that it does not contribute to any loss or statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hybridflow.batch import DataProto, objects
from hybridflow.config.schema import RunConfig
from hybridflow.data.custom import COLUMNS, Prompts
from hybridflow.data.image_tokens import IMAGES
from hybridflow.data.packing import sampled_tokens, without_rows
from hybridflow.observe.timeline import Timeline
from hybridflow.rollout.answering import Prompt, samples
from hybridflow.rollout.dumps import Dumps, dump_batch
from hybridflow.rollout.evaluation import Scorer, with_failures, without_failed
from hybridflow.rollout.groups import Groups
from hybridflow.rollout.protocols import Rollouts
from hybridflow.trainer.advantages import RequiredParts


class Samples(Protocol):
    """The source of a run's samples."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the dataset."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the most recent samples."""

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """Return the step's samples: prompts, responses and scores; if `greedy` is True, also
        greedy_scores."""

    async def of_prompts(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """Generate `n` samples for each of these prompts, which are not rows of the dataset."""

    def last_after(self, step: int) -> int | None:
        """Return the last step for which samples exist; None if unlimited."""

    def keep(self, batch: DataProto) -> DataProto:
        """Move token columns created on the driver to the object store, where workers read them."""

    def dump(self, folder: Path, step: int, batch: DataProto) -> None:
        """Write a step's samples to disk, for inspection or for a later run that trains on them."""

    def state(self) -> dict[str, Any]:
        """Return the JSON-serializable state for `restore`."""

    async def begun(self) -> DataProto | None:
        """Return the answers that are still being generated, to be saved together with `state`."""

    async def restore(
        self, state: Mapping[str, Any] | None, begun: DataProto | None = None, version: int = 0
    ) -> None:
        """Continue from a saved `state`, or start from the beginning if it is None."""

    async def forget(self) -> None:
        """Discard all answers in progress."""


class Sampled:
    """Scored answers from engines, for one batch of prompts or, with `algorithm.dynamic_sampling`,
    several.

    Args:
        keep: moves token columns created on the driver to the object store, where workers and
            engines read them.
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
        self._required = RequiredParts(config)
        self._dynamic: Mapping[str, float] = {}

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of dynamic sampling and of the sample groups."""
        return {**self._dynamic, **self.groups.metrics}

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """Implement `Samples.take`."""
        collected = DynamicSampling(self.config)
        batch = None
        while batch is None:
            with self.timeline.phase("gen"):
                answered = await self.groups.next_batch(step - 1)
            # only the remaining time, because groups are scored as soon as they finish
            with self.timeline.phase("reward"):
                batch = collected.add(self._counted(answered.union(await self.groups.scores())))
        self._dynamic = collected.metrics
        return await self._with_greedy_scores(batch) if greedy else batch

    async def of_prompts(self, prompts: Sequence[Prompt], n: int) -> DataProto:
        """Implement `Samples.of_prompts`."""
        data = self.config.data
        return self.keep(await samples(self.engines, self.scorer.tokenizer, data, prompts, n))

    def last_after(self, step: int) -> int | None:
        """Implement `Samples.last_after`."""
        return None

    def dump(self, folder: Path, step: int, batch: DataProto) -> None:
        """Implement `Samples.dump`."""
        dump_batch(folder, step, batch, self.scorer.tokenizer, self.made_with)

    def _counted(self, batch: DataProto) -> DataProto:
        """Exclude rows from training: failed rows and, if configured, overlong rows."""
        lost = self._required.lost(batch)
        if any(lost):
            batch = with_failures(batch, lost)
            self.scorer.check_failures(batch)
        batch = without_failed(batch, self.config.reward.on_failure)
        return without_overlong(batch) if self.config.algorithm.overlong_filter else batch

    async def _with_greedy_scores(self, batch: DataProto) -> DataProto:
        """Add greedy_scores [B] f32: the weighted score of the greedy answer to each row's
        prompt."""
        _, first, group = np.unique(batch["uid"], return_index=True, return_inverse=True)
        names = ("uid", *COLUMNS, *IMAGES)
        prompts = batch.rows(first).select([name for name in names if name in batch])
        with self.timeline.phase("gen_greedy"):
            answered = prompts.union(
                await self.engines.answers(self.engines.begin(prompts, training=False))
            )
        scores = (await self.scorer.score(answered))["scores"] * np.float32(
            self.config.reward.weight
        )
        return batch.with_columns(greedy_scores=scores[group])


class Dumped(Sampled):
    """Training samples from an earlier run's dumps, used instead of new answers."""

    def __init__(self, dumps: Dumps, *given: Any) -> None:
        """`given`: arguments passed to `Sampled`."""
        super().__init__(*given)
        self.dumps = dumps

    async def take(self, step: int, greedy: bool = False) -> DataProto:
        """Implement `Samples.take`."""
        batch = self.keep(self.dumps.batch(step))
        if greedy and "greedy_scores" not in batch:
            return await self._with_greedy_scores(batch)
        return batch

    def last_after(self, step: int) -> int | None:
        """Implement `Samples.last_after`."""
        return self.dumps.last_after(step)


def without_overlong(batch: DataProto) -> DataProto:
    """Exclude answers that reached the maximum length, because their end, and thus their score, is
    unknown (DAPO's overlong filtering, arXiv 2503.14476, section 3.4).
    """
    cut_off = batch["finish_reason"] == "length"
    return without_rows(batch, cut_off) if cut_off.any() else batch


def groups_that_differ(batch: DataProto) -> np.ndarray:
    """Return, in order of appearance, the ids (`uid`) of groups in which at least two unmasked
    samples have different scores. In any other group, all group-relative advantages are 0.
    """
    counts = sampled_tokens(batch) > 0
    uid = batch["uid"][counts]
    scores = batch["scores"][counts]
    ids, group = np.unique(uid, return_inverse=True)
    low = np.full(len(ids), np.inf)
    high = np.full(len(ids), -np.inf)
    np.minimum.at(low, group, scores)
    np.maximum.at(high, group, scores)
    return in_order(batch["uid"][np.isin(batch["uid"], ids[high > low])])


def in_order(ids: np.ndarray) -> np.ndarray:
    """Return the distinct group ids in order of first appearance."""
    found, first = np.unique(ids, return_index=True)
    return found[np.argsort(first)]


class DynamicSampling:
    """Collects groups whose scores differ, over at most `algorithm.dynamic_sampling` batches per
    step (DAPO, arXiv 2503.14476, section 3.2). If there are too few, the step is completed with
    groups whose scores are equal, so that the number of rows is the same in every step. `metrics`
    reports how many groups were discarded.
    """

    def __init__(self, config: RunConfig) -> None:
        self.rounds = config.algorithm.dynamic_sampling
        self.prompts = config.data.train_batch_size
        self.metrics: dict[str, float] = {}
        self._parts: list[DataProto] = []
        self._differ: list[np.ndarray] = []

    def add(self, batch: DataProto) -> DataProto | None:
        """Add a batch and return the rows of the step, or None if another batch is needed.

        Args:
            batch: prompts with answers and scores; `uid` starts at 0.
        """
        if not self.rounds:
            return batch
        batch = batch.with_columns(uid=batch["uid"] + len(self._parts) * self.prompts)
        self._parts.append(batch)
        self._differ.append(groups_that_differ(batch))
        if sum(map(len, self._differ)) < self.prompts and len(self._parts) < self.rounds:
            return None
        whole = DataProto.concat(_alike(self._parts))
        differ = np.concatenate(self._differ)
        order = in_order(whole["uid"])
        same = order[~np.isin(order, differ)]
        chosen = np.concatenate([differ, same])[: self.prompts]
        used = np.isin(whole["uid"], chosen)
        self._report(whole, used, len(differ), len(order))
        return whole.rows(np.flatnonzero(used))

    def _report(self, whole: DataProto, used: np.ndarray, differ: int, groups: int) -> None:
        tokens = whole.lengths("response_ids")
        filled = max(self.prompts - differ, 0)
        self.metrics = {
            "sampling/batches": float(len(self._parts)),
            "sampling/groups_differ": differ / groups,
            "sampling/groups_thrown_away": float(groups - differ - filled),
            "sampling/groups_surplus": float(max(differ - self.prompts, 0)),
            "sampling/groups_filled": float(filled),
            "sampling/tokens_thrown_away": float(tokens[~used].sum()),
            "sampling/tokens_used": float(tokens[used].sum() / max(tokens.sum(), 1)),
        }


def _alike(parts: list[DataProto]) -> list[DataProto]:
    """Add missing columns so that all batches have the same ones. Columns for extra values and
    failures exist only in batches in which the reward returned them.
    """
    names = {name for part in parts for name in part.columns}
    found = []
    for part in parts:
        added = {}
        for name, missing in (("reward_extra", {}), ("reward_failure", None)):
            if name in names and name not in part:
                added[name] = objects([missing] * len(part))
        found.append(part.with_columns(**added) if added else part)
    return found
