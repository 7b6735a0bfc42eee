"""Which groups of answers a step trains: a buffer between engines that go on and a policy that moves.

A group is a prompt with its samples. As a step begins, prompts for this one and `trainer.max_staleness` more are handed
out, and it takes those that were handed out with the oldest weights, of these the ones that have ended first. So no
token that is trained is more than `max_staleness` versions old: an answer has the time of so many steps, and a step
waits for one that takes longer. With 0 a step waits for all that it hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.data.custom import Prompts, open_sampler
from hybridflow.rollout.protocols import RolloutService
from hybridflow.rollout.requests import concat


@dataclass(frozen=True, eq=False)
class _Group:
    """Rows of `prompts` that were handed out with the weights of `version`, for a row of the dataset."""

    index: int
    version: int
    prompts: DataProto
    rows: slice
    tickets: Sequence[int]


class Groups:
    """The groups that are not yet trained.

    Args:
        keep: moves token columns that the driver makes to where workers and engines read them.
    """

    def __init__(
        self, config: RunConfig, engines: RolloutService, dataset: Prompts, keep: Callable[[DataProto], DataProto]
    ) -> None:
        self.config, self.engines, self.dataset, self.keep = config, engines, dataset, keep
        self.sampler = open_sampler(config.data, dataset, config.seed)
        self._left: list[_Group] = []
        self._next: list[int] = []  # rows of the dataset that are handed out before those of the sampler
        self._first = self.state()
        self.metrics: dict[str, float] = {}

    def next_batch(self, version: int) -> DataProto:
        """Prompts and answers of `data.train_batch_size` groups for the step that begins with these weights; `uid`
        tells the samples of one prompt.

        Raises:
            HybridFlowError: what `RolloutService.poll` raises.
        """
        self._hand_out(version)
        while (chosen := self._ready()) is None:
            self.engines.poll()
        taken = set(map(id, chosen))
        self._left = [group for group in self._left if id(group) not in taken]
        age = np.array([version - group.version for group in chosen])
        if self.config.trainer.max_staleness:
            self.metrics = {
                "rollout/staleness/mean": float(age.mean()),
                "rollout/staleness/max": float(age.max()),
                "rollout/groups_left": float(len(self._left)),
            }
        prompts = concat([group.prompts.rows(group.rows) for group in chosen])
        answered = self.engines.take([ticket for group in chosen for ticket in group.tickets])
        uid = np.repeat(np.arange(len(chosen), dtype=np.int64), self.config.rollout.n)
        return self.keep(prompts.with_columns(uid=uid).union(answered))

    def forget(self) -> None:
        """Have the engines give up what is not trained; `restore` hands it out again."""
        self._left, self._next = [], []
        self.engines.forget()

    def state(self) -> dict[str, Any]:
        """What `restore` needs, JSON-able: the order of the prompts, and those that are handed out and not trained."""
        left = [group.index for group in self._left]
        return {"sampler": self.sampler.state(), "handed_out": [*left, *self._next]}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on where `state` was taken, or without it at the first prompt. Prompts that were handed out then are
        handed out again: none is lost, and none is trained twice.

        Raises:
            CheckpointError: the dataset or its order is another one.
        """
        self.forget()
        state = state or self._first
        self.sampler.restore(state["sampler"])
        self._next = [int(row) for row in state.get("handed_out", [])]

    def _hand_out(self, version: int) -> None:
        """Submit prompts until as many are handed out as the version allows."""
        size, n, trainer = self.config.data.train_batch_size, self.config.rollout.n, self.config.trainer
        missing = min(1 + trainer.max_staleness, trainer.total_steps - version) * size - len(self._left)
        while len(self._next) < missing:
            self._next += next(self.sampler).tolist()
        if missing < 1:
            return
        rows, self._next = self._next[:missing], self._next[missing:]
        batch = self.dataset.batch(np.array(rows, np.int64))
        batch = self.keep(batch.with_columns(uid=np.arange(len(batch), dtype=np.int64)).repeat(n))
        tickets = self.engines.submit(batch, training=True)
        for number, index in enumerate(rows):
            own = slice(number * n, (number + 1) * n)
            self._left.append(_Group(index, version, batch, own, tickets[own]))

    def _ready(self) -> list[_Group] | None:
        """The groups that the step trains, in the order in which they were handed out; None while it has to wait."""
        ended = {id(group) for group in self._left if self.engines.ended(group.tickets)}
        oldest_first = sorted(self._left, key=lambda group: (group.version, id(group) not in ended))
        chosen = {id(group) for group in oldest_first[: self.config.data.train_batch_size]}
        return [group for group in self._left if id(group) in chosen] if chosen <= ended else None
