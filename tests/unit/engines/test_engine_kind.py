"""A kind of engine from a file outside of the package: worker, service, sync and restarts work with it as they are."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import DataConfig, RolloutConfig, RunConfig, SamplingConfig
from hybridflow.dispatch import WorkerContext
from hybridflow.engines.base import ENGINES, NO_EXTRAS, Completion, WeightSpan
from hybridflow.errors import ConfigError, EngineError, EngineSilent, EnginesLostError
from hybridflow.rollout.protocols import answers
from hybridflow.rollout.service import EngineGroup
from hybridflow.rollout.weight_sync import SliceSync
from hybridflow.sync.schedule import PlanFacts
from hybridflow.sync.session import Order, Outcome
from hybridflow.workers import rollout as workers_rollout
from hybridflow.workers.requests import CUT_SHORT
from hybridflow.workers.rollout import RolloutWorker
from tests.dist.harness.threads import Threads

KIND = f"{Path(__file__).parent / 'counting_engine.py'}:counting"
PLAN = PlanFacts("d" * 64, 10, 0, (), (100, 100), ((0,), (0,)), ((0,), (1,)), (50, 60), (3, 4))
PROMPTS = DataProto.from_columns({"prompt_ids": Jagged.from_rows([[1, 2], [30], [7, 7, 7], [50]], np.int64)})


class Policy:
    """Trainer ranks that hold a plan and send nothing."""

    def run(self, method: Any, *args: Any, timeout: float | None = None) -> Any:
        return {"device_kind": "cpu", "open_sync_store": ("127.0.0.1", 1), "plan_weights": [PLAN]}[method.__name__]

    def submit(self, method: Any, orders: list[Order], *args: Any, timeout: float) -> Any:
        class Sent:
            def result(self) -> list[list[Outcome]]:
                return [[Outcome(order.engine, order.number, "served", rank=0) for order in orders]]

        return Sent()


class World:
    """Two engines of the kind, their workers, and the driver's service and sync over them."""

    def __init__(self, folder: Path, max_restarts: int) -> None:
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({"model_type": "none"}))
        rollout = RolloutConfig(engine=KIND, num_engines=2, max_restarts=max_restarts, sampling=SamplingConfig(0.7))
        config = RunConfig(output_dir=str(folder), rollout=rollout, data=DataConfig(max_response_length=3))
        contexts = [WorkerContext(rank, 2, rank, "here", 0, "here", folder / "log") for rank in range(2)]
        self.workers = [RolloutWorker(context, rollout, self.model, "float32", 1) for context in contexts]
        group: Any = Threads(self.workers)
        policy: Any = Policy()
        self.service = EngineGroup(group, config, [])
        self.service.wait_ready()
        self.sync = SliceSync(policy, self.service, config)
        self.sync.prepare()

    def engine(self, number: int) -> Any:
        return self.workers[number].supervisor.engine

    def settled(self) -> list[str]:
        """The states once no engine is starting any more."""
        deadline = time.monotonic() + 60.0
        while any(state.state == "starting" for state in self.service.states()):
            assert time.monotonic() < deadline
        return [state.state for state in self.service.states()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    built = World(tmp_path, max_restarts=1)
    yield built
    built.service.stop()


def test_it_answers_in_order_with_the_settings_of_training_or_validation(world: World) -> None:
    assert world.sync.sync(5).nbytes == 16
    batch = answers(world.service, PROMPTS, training=True)
    assert [row.tolist() for row in batch.jagged("response_ids")] == [[3, 4, 5], [31, 32, 33], [8, 9, 10], [51, 52, 53]]
    assert set(batch.jagged("response_versions").values.tolist()) == {5}
    answers(world.service, PROMPTS, training=False)
    calls = ["generate at temperature 0.7", "generate at temperature 0.0"]
    assert [world.engine(number).calls for number in (0, 1)] == [calls, calls]


def test_it_gives_its_memory_away_and_takes_it_again(world: World) -> None:
    world.service.sleep()
    world.service.wake(["weights"])
    assert world.engine(0).calls == ["sleep", "wake ['weights']"]


def test_one_that_ended_is_replaced_and_takes_the_next_weights(world: World) -> None:
    world.sync.sync(1)
    world.engine(0).kill()
    assert len(answers(world.service, PROMPTS, training=True)) == 4 and set(world.service.stale) == {0}
    assert world.settled() == ["up", "up"]
    assert world.sync.sync(2).stale == {} and world.engine(0).version == 2
    assert world.engine(0).log_path.name == "engine-0.1.log"


def test_one_that_ends_more_often_within_an_hour_than_allowed_is_given_up(world: World) -> None:
    for version in (1, 2):
        world.sync.sync(version)
        world.engine(0).kill()
        states = world.settled()
    assert states == ["failed", "up"]
    reason = world.service.states()[0].reason
    assert "rollout.max_restarts=1 allows no more restarts in this hour" in reason and "ended" in reason
    assert len(answers(world.service, PROMPTS, training=True)) == 4


def test_a_restart_that_fails_is_told(world: World) -> None:
    world.sync.sync(1)
    (world.model / "broken").touch()
    for number in (0, 1):
        world.engine(number).kill()
    with pytest.raises(EnginesLostError, match=r"(?s)engine-0 is \w+: .*engine-1 is \w+: "):
        answers(world.service, PROMPTS, training=True)
    assert world.settled() == ["failed", "failed"]
    assert "could not be started again: engine engine-0: ended" in world.service.states()[0].reason


def test_one_without_weights_answers_nobody(world: World) -> None:
    asked = PROMPTS.with_columns(ticket=np.arange(4), max_new_tokens=np.full(4, 3))
    world.workers[0].ask(asked, SamplingConfig(), [], NO_EXTRAS)
    batch = world.workers[0].collect(60.0)
    assert batch["ticket"].tolist() == [0, 1, 2, 3]
    assert set(batch["finish_reason"]) == {CUT_SHORT} and not batch.lengths("response_ids").any()


def test_the_others_go_on_from_the_last_token_of_one_that_is_lost(world: World) -> None:
    world.sync.sync(5)
    engine = world.engine(0)

    def lose(prompts: Any, *_: Any, **__: Any) -> Any:
        engine.kill()
        error = EngineError("ended", engine="engine-0")
        ended = Completion([9, 9, 9], [-1.0] * 3, "stop", (WeightSpan("5", 0, 3),))
        error.begun = (ended, Completion([31], [-2.0], "abort", (WeightSpan("4", 0, 1),)))
        raise error

    engine.generate = lose
    batch = answers(world.service, PROMPTS, training=True)
    assert [row.tolist() for row in batch.jagged("response_ids")] == [[9, 9, 9], [31, 32, 33], [8, 9, 10], [51, 52, 53]]
    assert batch["finish_reason"].tolist() == ["stop", "length", "length", "length"]
    assert batch.jagged("response_versions").row(1).tolist() == [4, 5, 5]
    assert batch.jagged("rollout_log_probs").row(1).tolist() == [-2.0, -0.5, -0.5]
    assert batch["weight_version"].tolist() == ["5"] * 4 and set(world.service.stale) == {0}
    assert world.engine(1).calls.count("generate at temperature 0.7") == 2  # its own share, and one answer's rest


def test_single_requests_are_aborted(world: World) -> None:
    """Under way in a call of `generate`, or in a later one, which then leaves them out; at the engine or in the
    driver."""
    world.sync.sync(5)
    world.service.quarantine({1: "not asked"})
    engine, generate, going_on = world.engine(0), world.engine(0).generate, threading.Event()
    asked: list[list[list[int]]] = []

    def wait(prompts: Any, *rest: Any, **named: Any) -> Any:
        asked.append(prompts)
        assert going_on.wait(60.0)
        return generate(prompts, *rest, **named)

    engine.generate = wait
    prompts = PROMPTS.with_columns(room=np.array([1, 2, 2, 1]))
    tickets = world.service.submit(prompts, training=True)
    world.service.poll()
    world.service.abort([tickets[0]])
    world.service.abort([tickets[1]], keep=True)
    world.service.abort([tickets[3]], keep=True)
    going_on.set()
    while not world.service.ended(tickets[1:]):
        world.service.poll()
    assert asked == [[[1, 2], [50]], [[7, 7, 7]]] and not world.service.ended(tickets[:1])
    batch = world.service.take(tickets[1:])
    assert [row.tolist() for row in batch.jagged("response_ids")] == [[], [8, 9], [51]]
    assert batch["finish_reason"].tolist() == ["abort", "length", "length"]  # the last had no other call to wait for
    assert not world.service._under_way and not world.workers[0].requests._parts


def test_an_aborted_request_of_an_engine_that_is_lost_keeps_its_beginning(world: World) -> None:
    world.sync.sync(5)
    world.service.quarantine({1: "not asked"})
    engine, going_on = world.engine(0), threading.Event()

    def lose(prompts: Any, *_: Any, **__: Any) -> Any:
        assert going_on.wait(60.0)
        engine.kill()
        error = EngineError("ended", engine="engine-0")
        error.begun = tuple(Completion([9], [-1.0], "abort", (WeightSpan("5", 0, 1),)) for _ in prompts)
        raise error

    engine.generate = lose
    [ticket] = world.service.submit(PROMPTS.rows(np.array([1])), training=True)
    world.service.poll()
    world.service.abort([ticket], keep=True)
    going_on.set()
    while not world.service.ended([ticket]):
        world.service.poll()
    batch = world.service.take([ticket])
    assert (batch.jagged("response_ids").row(0).tolist(), batch["finish_reason"].tolist()) == ([9], ["abort"])


def test_an_error_of_one_that_still_runs_is_the_callers(world: World) -> None:
    world.sync.sync(5)

    def refuse(*_: Any, **__: Any) -> Any:
        raise EngineError("too long", engine="engine-0")

    world.engine(0).generate = refuse
    with pytest.raises(EngineError, match="engine-0: too long"):
        answers(world.service, PROMPTS, training=True)
    assert world.service.stale == {}


def test_one_that_hangs_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_rollout, "_SETTLE_S", 0.0)
    world.sync.sync(5)

    def hang(*_: Any, **__: Any) -> Any:
        raise EngineSilent("/generate not answered within 3 s", engine="engine-0")

    world.engine(0).generate = hang
    assert len(answers(world.service, PROMPTS, training=True)) == 4
    assert "not answered within 3 s" in world.service.stale[0]
    assert world.settled() == ["up", "up"]


def test_an_unknown_kind_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine=sglan: .*did you mean 'sglang'"):
        ENGINES.get("sglan")
