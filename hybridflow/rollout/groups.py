"""Selection of the groups that a step trains on. This module buffers groups between the engines,
which generate continuously, and the policy, which is updated every step.

A group consists of a prompt and its samples. At the start of a step, prompts for this and some
later steps are submitted, and the step trains on groups that have finished. An answer may take up
to `trainer.max_staleness` steps. If an answer would take longer, the step waits for it, so no
trained token is older than `trainer.max_staleness` versions. If the limit is 0, a step waits for
everything that it submits.

The prefetch depth is `trainer.steps_ahead`. By default, it is the mean time that the last batch's
groups took to finish, measured in steps without waiting. By Little's law, the groups of that many
steps are in flight when a step starts, and the groups for one more step have finished. Samples are
thus no older than needed to keep the trainer busy.

With `trainer.tail_batching` (RollPacker, arXiv 2509.21009), a step of a synchronous run submits
more prompts than it trains on, uses the groups that finish first and aborts the others. Once enough
prompts for a step have been aborted, one step (a long round) generates only these, starting from
scratch, and waits for all of them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.data.custom import Prompts, open_sampler
from hybridflow.data.images import COLUMN, with_pixels
from hybridflow.rollout.evaluation import Scorer, Scoring
from hybridflow.rollout.protocols import Rollouts, Sample
from hybridflow.rollout.requests import concat

# tolerate this share of late groups before prefetching another step
_LATE = 0.1


@dataclass(eq=False)
class _Group:
    """The samples of one dataset row. Their prompts are `prompts[rows]`, submitted at weight
    version `version`. `scoring` is set once the last sample has finished. `since` is the time of
    submission, and `steps` the time from submission to scoring, both in units of `_StepClock`.
    """

    index: int
    version: int
    prompts: DataProto
    rows: slice
    samples: Sequence[Sample]
    since: float
    scoring: Scoring | None = None
    steps: float = 0.0

    def done(self) -> bool:
        """Return True if all samples have finished."""
        return all(one.done() for one in self.samples)


class _StepClock:
    """A clock that counts steps. It advances by one during each training phase between two batches,
    and at the same rate while the trainer waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.time = 0.0
        self._version = -1
        self._training: float | None = None  # seconds of the last training phase
        self._mark = clock()

    def step_begins(self, version: int) -> None:
        """Record that the trainer has requested a batch. Multiple requests at the same weight
        version count as one step.
        """
        if self._version not in (-1, version):
            self._training = max(self._clock() - self._mark, 1e-3)
            self.time += 1
        self._version = version

    def wait_begins(self) -> None:
        """Record that the trainer has started waiting."""
        self._mark = self._clock()

    def waited(self) -> None:
        """Advance the clock by the time waited since `wait_begins` or the last call."""
        now = self._clock()
        if self._training is not None:
            self.time += (now - self._mark) / self._training
        self._mark = now


class Groups:
    """The groups that are waiting to be trained on, finished or in flight.

    Args:
        keep: moves token columns created on the driver to the object store, where workers and
            engines read them.
        scorer: scores each group as soon as it finishes, while engines generate others.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Rollouts,
        dataset: Prompts,
        keep: Callable[[DataProto], DataProto],
        scorer: Scorer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.engines = engines
        self.dataset = dataset
        self.keep = keep
        self.scorer = scorer
        self.sampler = open_sampler(config.data, dataset, config.seed)
        self._left: list[_Group] = []
        # dataset rows to submit before those of the sampler
        self._next: list[int] = []
        self._cut_off: list[int] = []  # dataset rows that wait for a long round
        # versions of the first of `_next`, and their answers
        self._begun: tuple[list[int], DataProto] | None = None
        self._scored: list[Scoring] = []  # of the groups of the last batch
        self._ahead = self._first_ahead()
        self._steps = _StepClock(clock)
        self._first = self.state()
        self.metrics: dict[str, float] = {}

    async def next_batch(self, version: int) -> DataProto:
        """Return the prompts and answers of `data.train_batch_size` groups for the step that starts
        at this weight version. Samples of the same prompt have the same `uid`.

        Raises:
            HybridFlowError: errors of `Rollouts.advance`.
        """
        self._steps.step_begins(version)
        self._hand_out(version)
        if self.config.trainer.max_staleness and self._left and not self._left[-1].done():
            # start the new prompts even if the step already has its groups
            await self.engines.advance()
        self._begin_scoring()
        self._steps.wait_begins()
        while (chosen := self._ready(version)) is None:
            await self.engines.advance()
            self._steps.waited()
            self._begin_scoring()
        self._follow(chosen)
        taken = set(chosen)
        self._left = [group for group in self._left if group not in taken]
        if self.config.trainer.tail_batching:
            # before the step starts: its slots are idle, and its memory may be needed
            await self._cut_off_rest()
        if self.config.trainer.max_staleness:
            age = np.array([version - group.version for group in chosen])
            self.metrics = {
                "rollout/staleness/mean": float(age.mean()),
                "rollout/staleness/max": float(age.max()),
                "rollout/groups_left": float(len(self._left)),
                "rollout/steps_ahead": float(self._ahead),
            }
        prompts = _prompts_of(chosen)
        answered = await self.engines.answers(_samples_of(chosen))
        self._scored = _scorings_of(chosen)
        uid = np.repeat(np.arange(len(chosen), dtype=np.int64), self.config.rollout.n)
        return self.keep(prompts.with_columns(uid=uid).union(answered))

    async def scores(self) -> DataProto:
        """Wait for the scores of the last `next_batch`, and return them in the format of
        `Scorer.score`. Can be called only once per batch."""
        scored = self._scored
        self._scored = []
        return await self.scorer.finish(scored)

    async def forget(self) -> None:
        """Abort all groups that have not been trained on. `restore` resubmits them."""
        self._forget_scoring()
        self.scorer.forget(self._scored)
        self._scored = []
        self._left = []
        self._next = []
        self._cut_off = []
        self._begun = None
        await self.engines.forget()

    def state(self) -> dict[str, Any]:
        """Return a JSON-serializable state for `restore`: the order of the prompts, and the prompts
        that were submitted but not trained on."""
        left = [group.index for group in self._left]
        return {
            "sampler": self.sampler.state(),
            "handed_out": [*left, *self._next],
            "cut_off": list(self._cut_off),
            **self._kind(),
            "versions": [group.version for group in self._left],
        }

    async def begun(self) -> DataProto | None:
        """Return the partial answers to prompts that were submitted but not trained on; None if
        there are none. Call it together with `state`. The columns are the group's position in that
        state (`group`), the sample's position in the group, and the answer so far.
        """
        samples = _samples_of(self._left)
        begun = await self.engines.begun(samples) if samples else None
        if begun is None:
            return None
        group, sample = np.divmod(begun["sample"], self.config.rollout.n)
        return begun.with_columns(group=group, sample=sample)

    async def restore(
        self, state: Mapping[str, Any] | None, begun: DataProto | None = None, version: int = 0
    ) -> None:
        """Continue from `state`, or from the first prompt if it is None. Prompts that were in
        flight are resubmitted and continue from `begun`: none is lost, and none is trained on
        twice.

        Args:
            begun: the result of `begun`, saved together with `state`. Answers that would be too old
                for this run, or were generated with incompatible settings, are dropped.
            version: version of the weights at the start of the next step.

        Raises:
            CheckpointError: the dataset or its order is different.
        """
        await self.forget()
        state = state or self._first
        self.sampler.restore(state["sampler"])
        self._next = [int(row) for row in state.get("handed_out", [])]
        cut_off = [int(row) for row in state.get("cut_off", [])]
        if self.config.trainer.tail_batching:
            self._cut_off = cut_off
        else:
            self._next += cut_off
        self._set_ahead(len(self._next) // self.config.data.train_batch_size)
        if begun is not None and self._kind().items() <= state.items():
            versions = state["versions"]
            kept = [self._kept(made_by, versions, version) for made_by in versions]
            self._begun = kept, begun

    def _kind(self) -> dict[str, Any]:
        """Return the settings that must match for a partial answer to be continued."""
        return {
            "n": self.config.rollout.n,
            "loop": self.config.rollout.agent.loop,
            "routes": derived.needs_engine_routes(self.config),
        }

    def _kept(self, made_by: int, versions: list[int], version: int) -> int:
        """Return the version at which a group was submitted (`made_by`), or -1 if the group could
        become too old. Assumes that it is trained on after all groups of the same age.
        """
        earlier = sum(one <= made_by for one in versions) - 1
        steps = earlier // self.config.data.train_batch_size
        age = version + steps - made_by
        return made_by if age <= self.config.trainer.max_staleness else -1

    def _hand_out(self, version: int) -> None:
        """Submit as many prompts as the prefetch depth allows at this weight version."""
        size = self.config.data.train_batch_size
        n = self.config.rollout.n
        total = derived.total_steps(self.config, len(self.dataset)) or 1
        steps = total - version
        if self.config.trainer.tail_batching:
            rows = self._round(steps * size)
        else:
            wanted = min(1 + self._ahead, steps) * size
            rows = self._drawn(wanted - len(self._left))
        if not rows:
            return
        versions, begun = self._taken_up(len(rows), version)
        batch = self.dataset.batch(np.array(rows, np.int64))
        if COLUMN in batch:
            batch = with_pixels(batch, self.dataset)
        uid = np.arange(len(batch), dtype=np.int64)
        batch = self.keep(batch.with_columns(uid=uid).repeat(n))
        samples = self.engines.begin(batch, training=True, begun=begun)
        now = self._steps.time
        for number, index in enumerate(rows):
            own = slice(number * n, (number + 1) * n)
            group = _Group(index, versions[number], batch, own, samples[own], now)
            self._left.append(group)

    def _taken_up(self, count: int, version: int) -> tuple[list[int], DataProto | None]:
        """Return the weight versions of the next `count` prompts, and the partial answers to them
        that an earlier process recorded.
        """
        if self._begun is None:
            return [version] * count, None
        kept, begun = self._begun
        self._begun = None
        kept = [*kept, *[-1] * count][:count]
        goes_on = np.array([*kept, -1])[np.minimum(begun["group"], count)] >= 0
        begun = begun.rows(np.flatnonzero(goes_on))
        versions = [version if made_by < 0 else made_by for made_by in kept]
        if not len(begun):
            return versions, None
        row = begun["group"] * self.config.rollout.n + begun["sample"]
        return versions, begun.drop(["group", "sample"]).with_columns(row=row)

    def _begin_scoring(self) -> None:
        """Start scoring the groups that have finished since the last call."""
        new = [group for group in self._left if group.scoring is None and group.done()]
        if not new:
            return
        prompts = _prompts_of(new)
        answered = self.engines.shown(_samples_of(new))
        parts = self.scorer.begin(prompts.union(answered), self.config.rollout.n)
        for group, part in zip(new, parts, strict=True):
            group.steps = self._steps.time - group.since
            group.scoring = part

    def _forget_scoring(self) -> None:
        self.scorer.forget(_scorings_of(self._left))

    def _drawn(self, count: int) -> list[int]:
        """Return the next `count` rows of the dataset; an empty list if `count` is not positive."""
        while len(self._next) < count:
            self._next += next(self.sampler).tolist()
        count = max(count, 0)
        rows = self._next[:count]
        self._next = self._next[count:]
        return rows

    def _round(self, still: int) -> list[int]:
        """Return the dataset rows for a round with tail batching: aborted prompts if there are
        enough for a step, otherwise new ones. A round never contains more than `still` prompts, the
        number that remains to be trained on.
        """
        size = self.config.data.train_batch_size
        waiting = len(self._cut_off)
        new = 0
        if waiting < size:
            new = min(derived.short_round_prompts(self.config), still - waiting)
        old = max(size - new, 0)
        rows = self._drawn(new) + self._cut_off[:old]
        self._cut_off = self._cut_off[old:]
        self.metrics = {"rollout/prompts_handed_out": float(len(rows))}
        return rows

    async def _cut_off_rest(self) -> None:
        """Abort the groups that the step does not train on, and defer them to a long round."""
        await self.engines.abort(_samples_of(self._left))
        self._forget_scoring()
        self._cut_off += [group.index for group in self._left]
        self._left = []
        self.metrics["rollout/prompts_cut_off"] = float(len(self._cut_off))

    def _ready(self, version: int) -> list[_Group] | None:
        """Select the groups that the step trains on: first those that would otherwise become too
        old, then finished ones, oldest weights first. Returns them in order of submission, or None
        if the step has to wait.
        """
        size = self.config.data.train_batch_size
        ended = {group for group in self._left if group.scoring is not None}
        oldest_first = sorted(self._left, key=lambda group: (group.version, group not in ended))
        due = self._due(oldest_first, version)
        rest = [group for group in oldest_first[due:] if group in ended]
        chosen = [*oldest_first[:due], *rest][:size]
        found = set(chosen)
        if len(chosen) < size or not found <= ended:
            return None
        return [group for group in self._left if group in found]

    def _due(self, oldest_first: Sequence[_Group], version: int) -> int:
        """Return how many of these groups the step must train on so that none becomes too old."""
        size = self.config.data.train_batch_size
        most = self.config.trainer.max_staleness
        due = 0
        # the n-th group must be among the first n, and later steps can train `size` each
        for number, group in enumerate(oldest_first, start=1):
            due = max(due, number - size * (group.version + most - version))
        return due

    def _first_ahead(self) -> int:
        """Return the prefetch depth, in steps, to use until the generation time is known."""
        trainer = self.config.trainer
        if trainer.steps_ahead is None:
            return min(trainer.max_staleness, 1)
        return trainer.steps_ahead

    def _set_ahead(self, steps: int) -> None:
        """Set the prefetch depth to `steps`, within its bounds, unless it is configured."""
        trainer = self.config.trainer
        if trainer.steps_ahead is None:
            self._ahead = max(self._first_ahead(), min(steps, trainer.max_staleness))

    def _follow(self, trained: Sequence[_Group]) -> None:
        """Set the prefetch depth to the mean number of steps that these groups took to finish."""
        steps = np.mean([group.steps for group in trained])
        self._set_ahead(math.ceil(steps - _LATE))


def _samples_of(groups: Sequence[_Group]) -> list[Sample]:
    return [one for group in groups for one in group.samples]


def _scorings_of(groups: Sequence[_Group]) -> list[Scoring]:
    return [group.scoring for group in groups if group.scoring is not None]


def _prompts_of(groups: Sequence[_Group]) -> DataProto:
    """Return the prompts of the groups' samples, in order. Consecutive groups that were submitted
    together are selected at once."""
    parts = []
    for _, together in itertools.groupby(groups, key=lambda group: id(group.prompts)):
        found = list(together)
        rows = [np.arange(group.rows.start, group.rows.stop) for group in found]
        parts.append(found[0].prompts.rows(np.concatenate(rows)))
    return concat(parts)
