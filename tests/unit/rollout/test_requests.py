"""Requests over engines that end, cut short and lose what they were asked at random moments:
nothing is lost, nothing comes twice, and nobody is asked for more than fits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import DataConfig, RolloutConfig, RunConfig
from hybridflow.config.val_sets import VAL_SET
from hybridflow.data.balancing import shares
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.errors import EnginesLostError
from hybridflow.rollout.protocols import SyncReport
from hybridflow.rollout.requests import Request, Requests
from hybridflow.single_controller import block_on
from hybridflow.workers.requests import CUT_SHORT
from hybridflow.workers.rollout import response_columns

MOST = 7
RUNNING = 5


def whole(prompt: int) -> list[int]:
    """The answer of a prompt of one token if nothing is lost."""
    return [100 * prompt + i for i in range(1 + prompt % MOST)]


class Engines(Requests):
    """Each call of `_collect` ends some answers and, as `chance` says, loses an engine or all
    workers."""

    def __init__(self, count: int, seed: int, chance: float) -> None:
        rollout = RolloutConfig(num_engines=count, max_running_requests=RUNNING)
        sets = {"cold": {}, "warm": {"sampling": {"temperature": 0.5}}}
        super().__init__(
            RunConfig(rollout=rollout, data=DataConfig(max_response_length=MOST, val_sets=sets))
        )
        self.random = np.random.default_rng(seed)
        self.chance = chance
        self.version = 0
        self.rate = 0.4
        # ticket: prompt, bound
        self.held: list[dict[int, tuple[list[int], int]]] = [{} for _ in range(count)]
        self.lost: set[int] = set()
        self.placed: dict[int, list[int]] = {}  # ticket: the engines that were asked
        self.forgotten: list[int] = []
        self.temperatures: dict[int, float] = {}  # ticket: as it was asked last
        self.aborting: set[int] = set()

    def _serving(self) -> Sequence[int]:
        if len(self.lost) == len(self.held):
            raise EnginesLostError("no engine is left")
        return [number for number in range(len(self.held)) if number not in self.lost]

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        for engine, part in parts.items():
            temperature = self._sampling(training, part).temperature
            self.temperatures |= dict.fromkeys(part["ticket"].tolist(), temperature)
            assert engine not in self.lost and len(part)
            for ticket, prompt, most in zip(
                part["ticket"].tolist(),
                part.jagged("prompt_ids"),
                part["max_new_tokens"].tolist(),
                strict=True,
            ):
                self.held[engine][ticket] = (prompt.tolist(), most)
                self.placed.setdefault(ticket, []).append(engine)
        await asyncio.sleep(0)

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        self.version += 1
        for _ in range(3):
            await asyncio.sleep(0)  # a call of workers takes some time
        return [self._some_of(engine) for engine in engines]

    def _some_of(self, engine: int) -> DataProto:
        held = self.held[engine]
        found = dict[int, Completion]()
        is_lost = bool(self.random.random() < self.chance) or engine in self.lost
        for ticket, (prompt, most) in list(held.items()):
            rest = whole(prompt[0])[len(prompt) - 1 :]
            assert 0 < len(rest) <= most
            if ticket in self.aborting and not is_lost:
                tokens = rest[: self.random.integers(0, len(rest))]
                reason = "abort"
            elif is_lost:
                tokens = rest[: self.random.integers(0, len(rest) + (len(rest) == most))]
                reason = CUT_SHORT
            elif self.random.random() < self.rate:
                tokens = rest
                reason = "stop"
            else:
                continue
            del held[ticket]
            span = (WeightSpan(str(self.version), 0, len(tokens)),)
            found[ticket] = Completion(tokens, [-float(token) for token in tokens], reason, span)
        if is_lost:
            self.lost.add(engine)
        tickets = np.array(list(found), np.int64)
        return response_columns(list(found.values())).with_columns(ticket=tickets)

    async def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        raise RuntimeError("nothing is saved")

    async def _leave_out_lost(self, answers: int) -> None:
        self._serving()

    async def sync(self, version: int) -> SyncReport:
        raise RuntimeError("no weights are sent")

    async def sleep(self) -> None:
        raise RuntimeError("no device memory is held")

    async def wake(self, tags: Sequence[str]) -> None:
        raise RuntimeError("no device memory is held")

    async def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        for engine, part in tickets.items():
            assert set(part) <= self.held[engine].keys() and part
            self.aborting |= set(part)

    async def _forget(self, engines: Sequence[int]) -> None:
        self.forgotten += engines
        for engine in engines:
            self.held[engine].clear()

    def workers_die(self) -> None:
        for held in self.held:
            held.clear()
        self._ask_again()


def advance(engines: Requests) -> None:
    block_on(engines.advance())


def all_ended(requests: Iterable[Request]) -> bool:
    return all(one.done() for one in requests)


def numbers(requests: Iterable[Request]) -> list[int]:
    return [one.number for one in requests]


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_every_request_is_answered_once(seed: int) -> None:
    random = np.random.default_rng(1000 + seed)
    engines = Engines(1 + seed % 4, seed, chance=0.15)
    pending: list[tuple[DataProto, list[Request]]] = []
    for _ in range(4):
        prompts = prompts_of(int(random.integers(1, 9)), int(random.integers(1, 4)))
        pending.append((prompts, engines.begin(prompts, training=bool(random.integers(2)))))
    while not all(all_ended(requests) for _, requests in pending):
        try:
            advance(engines)
        except EnginesLostError:
            engines.lost.clear()  # they start again and take the weights
        if random.random() < 0.1:
            engines.workers_die()
        if random.random() < 0.3:
            engines.lost -= {int(random.integers(len(engines.held)))}
    for prompts, requests in pending:
        check(engines.batch(requests), prompts)
    assert engines.is_idle


def test_an_engine_gets_the_samples_of_a_prompt_together_and_no_more_than_it_has_room_for() -> None:
    engines = Engines(2, 0, chance=0.0)
    prompts = prompts_of(20, 3)
    requests = engines.begin(prompts, training=True)
    most = 0
    while not all_ended(requests):
        advance(engines)
        most = max(most, *map(len, engines.held))
    assert most <= 2 * RUNNING + 2  # a prompt's samples are not divided over engines
    asked = [engines.placed[number] for number in numbers(requests)]
    assert all(len(engine) == 1 for engine in asked)
    assert all(len({asked[first + i][0] for i in range(3)}) == 1 for first in range(0, 60, 3))
    check(engines.batch(requests), prompts)


def test_an_engine_alone_is_asked_for_everything_at_once() -> None:
    """Then what it samples does not follow from when the driver looks."""
    engines = Engines(1, 0, chance=0.0)
    prompts = prompts_of(20, 3)
    engines.begin(prompts, training=True)
    advance(engines)
    assert list(engines.placed) == list(range(60))


def test_what_is_given_up_never_comes_back() -> None:
    engines = Engines(2, 0, chance=0.0)
    old = engines.begin(prompts_of(4), training=True)
    advance(engines)
    late = engines._under_way.copy()
    block_on(engines.forget())
    assert sorted(engines.forgotten) == sorted({one.engine for one in late.values()})
    prompts = prompts_of(3)
    check(block_on(engines.answers(engines.begin(prompts, training=False))), prompts)
    advance(engines)
    assert late and not any(one.done() for one in old if one.number in late)


def test_what_is_given_up_while_engines_are_asked_for_others_is_never_asked() -> None:
    async def give_up() -> None:
        engines = Engines(2, 0, chance=0.0)
        training = engines.begin(prompts_of(4), training=True)
        engines.begin(prompts_of(4), training=False)  # sampled otherwise: another call
        waiting = asyncio.ensure_future(engines.advance())
        while not engines.placed:
            await asyncio.sleep(0)
        await engines.forget()
        await waiting
        assert sorted(engines.placed) == numbers(training) and engines.is_idle

    block_on(give_up())


@pytest.mark.parametrize("seed", range(20))
def test_requests_are_aborted_one_by_one_wherever_they_are(seed: int) -> None:
    """The others are answered as if nothing had been."""
    random = np.random.default_rng(seed)
    engines = Engines(1 + seed % 3, seed, chance=0.1)
    prompts = prompts_of(20, 2)
    requests = engines.begin(prompts, training=True)
    unwanted = random.choice(40, 16, replace=False).tolist()
    left = [number for number in range(40) if number not in unwanted]
    while unwanted or not all_ended(requests[number] for number in left):
        with suppress(EnginesLostError):
            advance(engines)
        engines.lost -= {int(random.integers(len(engines.held)))}
        if unwanted and random.random() < 0.5:
            block_on(engines.abort([requests[unwanted.pop()]]))
        if random.random() < 0.05:
            engines.workers_die()
    check(engines.batch([requests[number] for number in left]), prompts.rows(np.array(left)))
    assert engines.is_idle


@pytest.mark.parametrize("seed", range(20))
def test_a_task_that_is_cancelled_takes_its_request_from_the_engine_within_a_round(
    seed: int,
) -> None:
    """Whether it is cancelled between two rounds or while one waits for its engine; nobody else's
    is touched."""
    random = np.random.default_rng(seed)

    async def cancel_some() -> None:
        engines = Engines(1 + seed % 3, seed, chance=0.0)
        requests = [
            engines.ask([1 + number], MOST, training=True, order=number) for number in range(40)
        ]
        tasks = [asyncio.ensure_future(engines.answer(one)) for one in requests]
        left = set(range(40))
        cancelled = set[int]()
        await asyncio.sleep(0)  # all wait
        while left:
            waiting = asyncio.ensure_future(engines.advance())
            for _ in range(int(random.integers(3))):
                await asyncio.sleep(0)  # the round goes on
            chosen = {
                number for number in left if not requests[number].done() and random.random() < 0.1
            }
            for number in chosen:
                tasks[number].cancel()
            await waiting
            await asyncio.sleep(0)
            await engines.advance()
            cancelled |= chosen
            for number in chosen:
                assert tasks[number].cancelled() and number not in engines._under_way
                at = [
                    engine
                    for engine in engines.placed.get(number, ())
                    if number in engines.held[engine]
                ]
                assert not at or number in engines.aborting
            left = {number for number in left - chosen if not tasks[number].done()}
        assert engines.aborting <= cancelled and 0 < len(cancelled) < 40
        for number in set(range(40)) - cancelled:
            batch, row = tasks[number].result()
            assert batch.jagged("response_ids").row(row).tolist() == whole(1 + number)
        assert engines.is_idle

    block_on(cancel_some())


def test_those_who_wait_at_the_same_time_share_a_round_and_its_error() -> None:
    async def wait(engines: Engines, count: int) -> list[BaseException | None]:
        return await asyncio.gather(
            *(engines.advance() for _ in range(count)), return_exceptions=True
        )

    async def share() -> list[dict[str, object]]:
        unseen: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        engines = Engines(2, 0, chance=0.0)
        prompts = prompts_of(9)
        requests = engines.begin(prompts, training=True)
        assert await wait(engines, 50) == [None] * 50 and engines.version == 1
        engines.begin(prompts_of(1), training=True)
        engines.lost = {0, 1}
        errors = await wait(engines, 50)
        assert isinstance(errors[0], EnginesLostError) and set(map(id, errors)) == {id(errors[0])}
        assert engines.version == 1
        engines.lost.clear()
        engines.chance = 1.0
        alone = asyncio.ensure_future(engines.advance())
        while engines.version == 1:
            await asyncio.sleep(0)
        alone.cancel()  # nobody is left that the error of this round could reach
        while len(engines.lost) < 2:
            await asyncio.sleep(0)
        engines.lost.clear()
        engines.chance = 0.0
        assert await wait(engines, 1) == [None] and engines.version == 3
        check(await engines.answers(requests), prompts)
        del errors, alone
        return unseen

    unseen = asyncio.run(share(), debug=True)
    gc.collect()
    assert unseen == []


def test_places_are_given_to_the_next_group_as_single_samples_end() -> None:
    """The slowest sample of a group holds its own place and no other (AReaL, pull request 1722:
    refill by sample)."""
    engines = Engines(2, 0, chance=0.0)
    requests = engines.begin(prompts_of(20, 5), training=True)
    block_on(engines._send())
    under_way = set(engines._under_way)
    assert len(under_way) == 20  # 2 engines x 2 x RUNNING: four groups of five
    for engine in (0, 1):  # one sample of each group goes on
        ended = [ticket for ticket in engines.held[engine] if ticket % 5]
        for ticket in ended:
            prompt, _ = engines.held[engine].pop(ticket)
            tokens = whole(prompt[0])
            answer = response_columns([Completion(tokens, [0.0] * len(tokens), "stop", ())])
            block_on(engines._receive(answer.with_columns(ticket=np.array([ticket]))))
    block_on(engines._send())
    assert not any(all_ended(requests[first : first + 5]) for first in range(0, 20, 5))
    assert len(engines._under_way) == 24 and len(set(engines._under_way) - under_way) == 20
    slow = [one for one in requests if one.number in under_way & set(engines._under_way)]
    block_on(engines.abort([*slow, *requests[20:25]]))  # their places are given to others, too
    assert len(engines._under_way) == 15
    block_on(engines._send())
    assert set(numbers(requests[40:45])) <= set(engines._under_way)


def test_a_request_whose_engine_is_lost_behind_the_last_token_it_may_make_has_ended() -> None:
    engines = Engines(1, 0, chance=1.0)
    prompts = prompts_of(1).with_columns(prompt_ids=Jagged.from_rows([[6]], np.int64))
    [request] = engines.begin(prompts, training=True)
    engines.random = np.random.default_rng(0)
    while not request.done():
        with pytest.raises(EnginesLostError):
            advance(engines)
        engines.lost.clear()
    batch = engines.batch([request])
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


@pytest.mark.parametrize("seed", range(5))
def test_every_set_is_sampled_in_its_own_way_also_after_a_loss(seed: int) -> None:
    engines = Engines(2, seed, chance=0.3)
    asked: list[Request] = []
    wanted: dict[int, float] = {}
    for name, training, temperature in (
        ("", True, 1.0),
        ("", False, 0.0),
        ("cold", False, 0.0),
        ("warm", False, 0.5),
    ):
        prompts = prompts_of(6)
        if name:
            prompts = prompts.with_columns(**{VAL_SET: np.array([name] * 6, object)})
        requests = engines.begin(prompts, training=training)
        asked += requests
        wanted |= dict.fromkeys(numbers(requests), temperature)
    while not all_ended(asked):
        try:
            advance(engines)
        except EnginesLostError:
            engines.lost.clear()
        assert engines.temperatures == {ticket: wanted[ticket] for ticket in engines.temperatures}
    assert engines.temperatures == wanted
