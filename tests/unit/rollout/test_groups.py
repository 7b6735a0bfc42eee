"""The buffer of groups: how old what is trained may be, and that every prompt is trained once,
however answers come."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import DataConfig, RolloutConfig, RunConfig, TrainerConfig
from hybridflow.rollout.groups import Groups
from hybridflow.single_controller import block_on

SIZE = 4
N = 2
ROWS = 10


@dataclass(eq=False)
class Answer:
    """A sample of a prompt that was handed out with the weights of a version."""

    prompt: int
    version: int
    is_over: bool = False

    def done(self) -> bool:
        return self.is_over


class Service:
    """Each poll ends some samples; the weights of the present version make whatever ends."""

    def __init__(self, seed: int, rate: float = 0.2) -> None:
        self.random = np.random.default_rng(seed)
        self.rate = rate
        self.version = 0
        self.open: list[Answer] = []
        self.ended: list[Answer] = []  # and neither taken nor aborted
        self.next = 0
        self.polls = 0
        self.now = 0.0

    def begin(
        self, prompts: DataProto, *, training: bool, begun: DataProto | None = None
    ) -> list[Answer]:
        assert training
        samples = [Answer(int(row[0]), self.version) for row in prompts.jagged("prompt_ids")]
        self.next += len(samples)
        self.open += samples
        return samples

    async def advance(self) -> None:
        self.poll()

    def poll(self) -> None:
        self.polls += 1
        self.end_some()

    def end_some(self) -> None:
        self.end([one for one in self.open if self.random.random() < self.rate])

    def end_all(self) -> None:
        self.end(self.open)

    def end(self, samples: Sequence[Answer]) -> None:
        self.open = [one for one in self.open if one not in samples]
        self.ended += samples
        for one in samples:
            one.is_over = True

    def hold_back(self) -> Answer:
        """The sample that was begun first, which ends when it is told to."""
        return self.open.pop(0)

    async def answers(self, samples: Sequence[Answer]) -> DataProto:
        for one in samples:
            self.ended.remove(one)  # a step takes them once
        versions = np.array([one.version for one in samples])
        return self.shown(samples).with_columns(first_version=versions)

    def shown(self, samples: Sequence[Answer]) -> DataProto:
        return DataProto.from_columns(
            {"response_ids": Jagged.from_rows([[one.prompt] for one in samples], np.int64)}
        )

    async def begun(self, samples: Sequence[Answer]) -> DataProto | None:
        return None

    async def abort(self, samples: Sequence[Answer]) -> None:
        for one in samples:
            (self.ended if one.is_over else self.open).remove(one)

    async def forget(self) -> None:
        self.open = []
        self.ended = []


class Scores:
    """The score of an answer is its prompt. Parts are open until somebody finishes or forgets
    them."""

    def __init__(self) -> None:
        self.open: dict[int, list[int]] = {}
        self.begun = 0

    def begin(self, batch: DataProto, size: int) -> list[int]:
        rows = [int(row[0]) for row in batch.jagged("response_ids")]
        parts = list(range(self.begun, self.begun + len(batch) // size))
        self.open |= {
            part: rows[number * size : (number + 1) * size] for number, part in enumerate(parts)
        }
        self.begun += len(parts)
        return parts

    async def finish(self, parts: Sequence[int]) -> DataProto:
        scores = [score for part in parts for score in self.open.pop(part)]
        return DataProto.from_columns({"scores": np.array(scores, np.float32)})

    def forget(self, parts: Sequence[int]) -> None:
        for part in parts:
            del self.open[part]


class Rows:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, rows: np.ndarray) -> DataProto:
        return DataProto.from_columns(
            {"prompt_ids": Jagged.from_rows([[row] for row in rows], np.int64)}
        )


def groups_of(
    service: Service,
    staleness: int,
    steps: int,
    size: int = SIZE,
    tail: float = 0.0,
    rows: int = ROWS,
    ahead: int | None = None,
) -> Groups:
    config = RunConfig(
        data=DataConfig(train_batch_size=size),
        rollout=RolloutConfig(n=N),
        trainer=TrainerConfig(
            total_steps=steps, max_staleness=staleness, tail_batching=tail, steps_ahead=ahead
        ),
    )
    given: Any = (service, Rows(rows), lambda batch: batch, Scores(), lambda: service.now)
    return Groups(config, *given)


def trained(groups: Groups, service: Service, version: int) -> list[int]:
    """The prompts of the next step, after checks of the batch."""
    service.version = version
    batch = block_on(groups.next_batch(version))
    prompts = [int(row[0]) for row in batch.jagged("prompt_ids")]
    assert prompts == [int(row[0]) for row in batch.jagged("response_ids")]
    assert batch["uid"].tolist() == np.repeat(np.arange(SIZE), N).tolist()
    assert all(len(set(prompts[i : i + N])) == 1 for i in range(0, SIZE * N, N))
    assert block_on(groups.scores())["scores"].tolist() == prompts
    scorer: Any = groups.scorer
    assert set(scorer.open) == {
        group.scoring for group in groups._left if group.scoring is not None
    }
    age = version - batch["first_version"]
    assert age.min() >= 0 and age.max() <= groups.config.trainer.max_staleness
    return prompts[::N]


def in_order(steps: int) -> list[int]:
    """The prompts that a synchronous run hands out."""
    service = Service(0)
    groups = groups_of(service, 0, steps)
    return [prompt for version in range(steps) for prompt in trained(groups, service, version)]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_each_prompt_is_trained_once_and_nothing_is_older_than_allowed(
    staleness: int, seed: int
) -> None:
    steps = 12
    service = Service(seed)
    groups = groups_of(service, staleness, steps, ahead=staleness)
    found = []
    for version in range(steps):
        found += trained(groups, service, version)
        handed_out = service.next // N
        assert handed_out == min(version + 1 + staleness, steps) * SIZE
    assert Counter(found) == Counter(in_order(steps))
    assert not service.open and not service.ended and not groups.state()["handed_out"]
    if staleness == 0:
        assert found == in_order(steps) and not groups.metrics
    else:
        assert groups.metrics["rollout/groups_left"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("rate", [0.02, 0.2, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_prompts_are_handed_out_as_late_as_the_engines_allow(
    staleness: int, rate: float, seed: int
) -> None:
    """Whatever the rate: each prompt once, none older than allowed, never more handed out than the
    bound allows."""
    steps = 20
    service = Service(seed, rate)
    groups = groups_of(service, staleness, steps)
    found = []
    for version in range(steps):
        found += trained(groups, service, version)
        assert (
            (version + 1) * SIZE <= service.next // N <= min(version + 1 + staleness, steps) * SIZE
        )
        for _ in range(3):  # while the policy trains
            service.end_some()
    assert Counter(found) == Counter(in_order(steps))
    assert not service.open and not service.ended and not groups.state()["handed_out"]


class Clock(Service):
    """Answers take `seconds` each, and training one second; to look at the engines takes a
    twentieth of it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(0)
        self.seconds = seconds
        self.since: dict[Answer, float] = {}

    def poll(self) -> None:
        self.now += 0.05
        self.end(
            [
                one
                for one in self.open
                if self.now >= self.since.setdefault(one, self.now) + self.seconds
            ]
        )


@pytest.mark.parametrize(("seconds", "wanted"), [(0.2, 1), (0.9, 1), (1.5, 2), (2.5, 3), (9.0, 3)])
def test_the_lead_follows_from_how_long_answers_take(seconds: float, wanted: int) -> None:
    service = Clock(seconds)
    groups = groups_of(service, 3, 100)

    def settled(version: int) -> tuple[set[float], set[float]]:
        """The lead and the age of prompts, without the first steps."""
        leads = set()
        ages = set()
        for number in range(version, version + 20):
            trained(groups, service, number)
            service.now += 1
            if number >= version + 8:
                leads.add(groups.metrics["rollout/steps_ahead"])
                ages.add(groups.metrics["rollout/staleness/mean"])
        return leads, ages

    assert settled(0) == ({wanted}, {wanted})
    service.seconds = 0.2
    assert settled(20) == ({1}, {1})
    service.seconds = seconds
    assert settled(40) == ({wanted}, {wanted})


@pytest.mark.parametrize("ahead", [None, 1])
def test_a_long_answer_does_not_make_others_wait(ahead: int | None) -> None:
    """With a lead of one step it may still take three, while groups that were handed out later are
    trained."""
    service = Service(0, 1.0)
    groups = groups_of(service, 3, 9, ahead=ahead)
    groups._hand_out(0)
    held = service.hold_back()
    for version in range(3):
        polls = service.polls
        assert held.prompt not in trained(groups, service, version) and service.polls <= polls + 1
    service.end([held])
    assert (
        held.prompt in trained(groups, service, 3) and groups.metrics["rollout/staleness/max"] == 3
    )


def test_a_resumed_run_hands_out_what_was_handed_out() -> None:
    service = Service(0, 0.0)
    groups = groups_of(service, 3, 30, ahead=3)
    groups._hand_out(0)
    service.end_all()
    trained(groups, service, 0)
    resumed = groups_of(Service(1), 3, 30)
    block_on(resumed.restore(json.loads(json.dumps(groups.state())), version=1))
    resumed._hand_out(1)
    assert resumed.state()["handed_out"][: 3 * SIZE] == groups.state()["handed_out"]


def test_a_long_answer_has_the_time_of_so_many_steps_as_it_may_be_old() -> None:
    service = Service(0)
    groups = groups_of(service, 2, 9, ahead=2)
    groups._hand_out(0)
    held = service.hold_back()
    for version in (0, 1):
        assert held.prompt not in trained(groups, service, version)
    polls = service.polls

    def poll() -> None:
        service.polls += 1
        if service.polls == polls + 50:
            service.end([held])
        service.end_all()

    service.poll = poll  # type: ignore[method-assign]
    assert held.prompt in trained(groups, service, 2) and service.polls == polls + 50


def test_a_group_is_scored_while_engines_still_answer_others_of_its_step() -> None:
    service = Service(0)
    groups = groups_of(service, 0, 3)
    scored: list[int] = []

    def poll() -> None:
        scorer: Any = groups.scorer
        scored.append(scorer.begun)
        service.end(service.open[:N])  # one group ends

    service.poll = poll  # type: ignore[method-assign]
    trained(groups, service, 0)
    assert scored == [0, 1, 2, 3]  # before each poll the groups that had ended were being scored


def test_engines_begin_what_a_step_hands_out_also_where_its_own_groups_have_ended_before() -> None:
    service = Service(0)
    groups = groups_of(service, 2, 9, ahead=2)
    service.poll = service.end_all  # type: ignore[method-assign]
    for version in range(3):
        trained(groups, service, version)
        assert not service.open  # the engines have seen it before the policy trains


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_stopped_anywhere_trains_each_prompt_once(seed: int) -> None:
    """What was under way is handed out again; also with another staleness and another size of the
    step."""
    random = np.random.default_rng(seed)
    steps = 9
    found: list[int] = []
    state: Any = None
    version = 0
    while version < steps:
        service = Service(seed + version)
        service.version = version
        staleness = int(random.integers(0, 4))
        groups = groups_of(
            service, staleness, steps, ahead=staleness if random.random() < 0.5 else None
        )
        block_on(groups.restore(state))
        for _ in range(int(random.integers(1, 4))):
            if version < steps:
                found += trained(groups, service, version)
                version += 1
        state = groups.state()
        groups._hand_out(version)  # lost with the process
    assert Counter(found) == Counter(in_order(steps))


def test_going_back_gives_up_what_is_under_way() -> None:
    service = Service(3)
    groups = groups_of(service, 2, 5, ahead=2)
    whole = trained(groups, service, 0) + trained(groups, service, 1)
    block_on(groups.restore(None))
    assert not service.open and not service.ended
    again = trained(groups, service, 0) + trained(groups, service, 1)
    assert sorted(groups.state()["handed_out"] + again) == sorted(in_order(4))
    assert len(whole) == len(again)


@pytest.mark.slow
@pytest.mark.parametrize("tail", [0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(12))
def test_with_tail_batching_each_prompt_of_an_epoch_is_trained_once_by_present_weights(
    tail: float, seed: int
) -> None:
    """Also of a run that is killed anywhere: inside a round, or between two steps with prompts that
    were cut off."""
    random = np.random.default_rng(seed)
    steps = 15
    found: list[int] = []
    rounds: list[int] = []
    state: Any = None
    version = 0
    while version < steps:
        service = Service(seed + version)
        service.version = version
        groups = groups_of(service, 0, steps, tail=tail, rows=SIZE * steps)
        block_on(groups.restore(state))
        for _ in range(int(random.integers(1, 6))):
            if version < steps:
                # no token is older than the present version
                found += trained(groups, service, version)
                rounds.append(int(groups.metrics["rollout/prompts_handed_out"]))
                version += 1
                # places and answers of what was cut off are given back
                assert not service.open and not service.ended
        state = json.loads(json.dumps(groups.state()))
        if version < steps:  # a step that is lost with the process
            groups._hand_out(version)
            service.poll()
    assert Counter(found) == Counter(range(SIZE * steps))
    assert not state["cut_off"] and not state["handed_out"]
    short = SIZE + max(1, round(SIZE * tail))
    assert rounds[0] == short and rounds[-1] == SIZE and set(rounds) <= set(range(SIZE, short + 1))


def test_a_long_round_answers_just_the_prompts_that_were_cut_off_and_waits_for_all() -> None:
    service = Service(0)
    groups = groups_of(service, 0, 10, tail=0.5, rows=100)

    def poll() -> None:
        # samples of the first two prompts of a short round
        slow = 0 if len(service.open) == SIZE * N else 2 * N
        service.end(service.open[slow:])

    service.poll = poll  # type: ignore[method-assign]
    short = trained(groups, service, 0) + trained(groups, service, 1)
    late = groups.state()["cut_off"]
    assert len(late) == SIZE and not set(late) & set(short)
    assert trained(groups, service, 2) == late and not groups.state()["cut_off"]
    assert groups.metrics == {"rollout/prompts_handed_out": 4.0, "rollout/prompts_cut_off": 0.0}


def test_prompts_that_were_cut_off_are_trained_also_by_a_run_without_tail_batching() -> None:
    service = Service(5)
    groups = groups_of(service, 0, 10, tail=0.5)
    found = trained(groups, service, 0) + trained(groups, service, 1)
    state = groups.state()
    assert len(state["cut_off"]) == 4
    groups = groups_of(service, 2, 6)
    block_on(groups.restore(state))
    for version in range(2, 6):
        found += trained(groups, service, version)
    assert Counter(found) == Counter(in_order(6))
