"""Requests over engines that end, cut short and lose what they were asked at random moments: nothing is lost, nothing
comes twice, and nobody is asked for more than fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import DataConfig, RolloutConfig, RunConfig
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.errors import EnginesLostError
from hybridflow.rollout.placing import shares
from hybridflow.rollout.protocols import answers
from hybridflow.rollout.requests import Requests
from hybridflow.workers.requests import CUT_SHORT
from hybridflow.workers.rollout import response_columns

MOST, RUNNING = 7, 5


def whole(prompt: int) -> list[int]:
    """The answer of a prompt of one token if nothing is lost."""
    return [100 * prompt + i for i in range(1 + prompt % MOST)]


class Engines(Requests):
    """Each call of `_collect` ends some answers and, as `chance` says, loses an engine or all workers."""

    def __init__(self, count: int, seed: int, chance: float) -> None:
        rollout = RolloutConfig(num_engines=count, max_running_requests=RUNNING)
        super().__init__(RunConfig(rollout=rollout, data=DataConfig(max_response_length=MOST)))
        self.random, self.chance, self.version = np.random.default_rng(seed), chance, 0
        self.held: list[dict[int, tuple[list[int], int]]] = [{} for _ in range(count)]  # ticket: prompt, bound
        self.lost: set[int] = set()
        self.asked: dict[int, list[int]] = {}  # ticket: the engines that were asked
        self.forgotten: list[int] = []

    def _serving(self) -> Sequence[int]:
        if len(self.lost) == len(self.held):
            raise EnginesLostError("no engine is left")
        return [number for number in range(len(self.held)) if number not in self.lost]

    def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        for engine, part in parts.items():
            assert engine not in self.lost and len(part)
            for ticket, prompt, most in zip(
                part["ticket"].tolist(), part.jagged("prompt_ids"), part["max_new_tokens"].tolist(), strict=True
            ):
                self.held[engine][ticket] = (prompt.tolist(), most)
                self.asked.setdefault(ticket, []).append(engine)

    def _collect(self, training: bool, engines: Sequence[int], wait_s: float) -> Sequence[DataProto]:
        self.version += 1
        return [self._some_of(engine) for engine in engines]

    def _some_of(self, engine: int) -> DataProto:
        held, found = self.held[engine], dict[int, Completion]()
        is_lost = bool(self.random.random() < self.chance) or engine in self.lost
        for ticket, (prompt, most) in list(held.items()):
            rest = whole(prompt[0])[len(prompt) - 1 :]
            assert 0 < len(rest) <= most
            if is_lost:
                tokens, reason = rest[: self.random.integers(0, len(rest) + (len(rest) == most))], CUT_SHORT
            elif self.random.random() < 0.4:
                tokens, reason = rest, "stop"
            else:
                continue
            del held[ticket]
            span = (WeightSpan(str(self.version), 0, len(tokens)),)
            found[ticket] = Completion(tokens, [-float(token) for token in tokens], reason, span)
        if is_lost:
            self.lost.add(engine)
        tickets = np.array(list(found), np.int64)
        return response_columns(list(found.values())).with_columns(ticket=tickets)

    def _leave_out_lost(self, answers: int) -> None:
        self._serving()

    def _forget(self, engines: Sequence[int]) -> None:
        self.forgotten += engines
        for engine in engines:
            self.held[engine].clear()

    def workers_die(self) -> None:
        for held in self.held:
            held.clear()
        self._ask_again()


def prompts_of(count: int, samples: int = 1) -> DataProto:
    rows = Jagged.from_rows([[1 + number] for number in range(count)], np.int64)
    return DataProto.from_columns({"prompt_ids": rows, "uid": np.arange(count)}).repeat(samples)


def check(batch: DataProto, prompts: DataProto) -> None:
    first = [int(row[0]) for row in prompts.jagged("prompt_ids")]
    assert [row.tolist() for row in batch.jagged("response_ids")] == [whole(one) for one in first]
    assert [row.tolist() for row in batch.jagged("rollout_log_probs")] == [
        [-float(token) for token in whole(one)] for one in first
    ]
    assert all(np.all(np.diff(row) >= 0) for row in batch.jagged("response_versions"))
    assert not {CUT_SHORT} & set(batch["finish_reason"].tolist())


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_every_request_is_answered_once(seed: int) -> None:
    random = np.random.default_rng(1000 + seed)
    engines = Engines(1 + seed % 4, seed, chance=0.15)
    pending: list[tuple[DataProto, list[int]]] = []
    for _ in range(4):
        prompts = prompts_of(int(random.integers(1, 9)), int(random.integers(1, 4)))
        pending.append((prompts, engines.submit(prompts, training=bool(random.integers(2)))))
    while not all(engines.ended(tickets) for _, tickets in pending):
        try:
            engines.poll()
        except EnginesLostError:
            engines.lost.clear()  # they start again and take the weights
        if random.random() < 0.1:
            engines.workers_die()
        if random.random() < 0.3:
            engines.lost -= {int(random.integers(len(engines.held)))}
    for prompts, tickets in pending:
        check(engines.take(tickets), prompts)
        assert not engines.ended(tickets)


def test_an_engine_gets_the_samples_of_a_prompt_together_and_no_more_than_it_has_room_for() -> None:
    engines, prompts = Engines(2, 0, chance=0.0), prompts_of(20, 3)
    tickets = engines.submit(prompts, training=True)
    most = 0
    while not engines.ended(tickets):
        engines.poll()
        most = max(most, *map(len, engines.held))
    assert most <= 2 * RUNNING + 2  # a prompt's samples are not divided over engines
    asked = [engines.asked[ticket] for ticket in tickets]
    assert all(len(engine) == 1 for engine in asked)
    assert all(len({asked[first + i][0] for i in range(3)}) == 1 for first in range(0, 60, 3))
    check(engines.take(tickets), prompts)


def test_an_engine_alone_is_asked_for_everything_at_once() -> None:
    """Then what it samples does not follow from when the driver looks."""
    engines, prompts = Engines(1, 0, chance=0.0), prompts_of(20, 3)
    engines.submit(prompts, training=True)
    engines.poll()
    assert list(engines.asked) == list(range(60))


def test_what_is_given_up_never_comes_back() -> None:
    engines = Engines(2, 0, chance=0.0)
    old = engines.submit(prompts_of(4), training=True)
    engines.poll()
    late = engines._under_way.copy()
    engines.forget()
    assert sorted(engines.forgotten) == sorted({one.engine for one in late.values()})
    prompts = prompts_of(3)
    check(answers(engines, prompts, training=False), prompts)
    assert not engines.ended(old[:1]) and engines.poll() is None


def test_a_request_whose_engine_is_lost_behind_the_last_token_it_may_make_has_ended() -> None:
    engines = Engines(1, 0, chance=1.0)
    [ticket] = engines.submit(prompts_of(1).with_columns(prompt_ids=Jagged.from_rows([[6]], np.int64)), training=True)
    engines.random = np.random.default_rng(0)
    while not engines.ended([ticket]):
        with pytest.raises(EnginesLostError):
            engines.poll()
        engines.lost.clear()
    batch = engines.take([ticket])
    assert batch.jagged("response_ids").row(0).tolist() == whole(6)
    assert batch["finish_reason"].tolist() == ["length"]


def test_shares_level_what_engines_owe() -> None:
    assert shares([1] * 6, {0: 0, 1: 0}) == [0, 0, 0, 1, 1, 1]
    assert shares([5], {0: 10, 1: 0}) == [1]
    assert shares([1] * 4, {3: 4, 5: 0}) == [5] * 4
    random = np.random.default_rng(0)
    for _ in range(200):
        owed = {number: int(random.integers(0, 50)) for number in range(random.integers(1, 7))}
        tokens = random.integers(1, 20, random.integers(1, 40)).tolist()
        load = dict(owed)
        for piece, engine in zip(tokens, shares(tokens, owed), strict=True):
            load[engine] += piece
        level = max((sum(load.values()) / len(load)), *owed.values())
        assert max(load.values()) <= level + max(tokens)
