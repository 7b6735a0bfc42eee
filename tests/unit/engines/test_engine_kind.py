"""A kind of engine from a file outside of the package: worker, service, sync and restarts work with
it as they are."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import DataConfig, RolloutConfig, RunConfig, SamplingConfig
from hybridflow.dispatch import WorkerContext
from hybridflow.engines.base import ENGINES, NO_EXTRAS, Completion, WeightSpan
from hybridflow.engines.supervisor import EngineState
from hybridflow.errors import ConfigError, EngineError, EngineSilent, EnginesLostError
from hybridflow.rollout.protocols import SyncReport
from hybridflow.rollout.service import EngineGroup
from hybridflow.rollout.weight_sync import SliceSync
from hybridflow.single_controller import block_on
from hybridflow.sync.schedule import PlanFacts
from hybridflow.sync.session import Order, Outcome
from hybridflow.sync.transports.base import Endpoint
from hybridflow.workers import rollout as workers_rollout
from hybridflow.workers.requests import CUT_SHORT
from hybridflow.workers.rollout import RolloutWorker
from tests.dist.harness.threads import Threads

KIND = f"{Path(__file__).parent / 'counting_engine.py'}:counting"
PLAN = PlanFacts("d" * 64, 10, 0, (), (100, 100), ((0,), (0,)), ((0,), (1,)), (50, 60), (3, 4))
PROMPTS = DataProto.from_columns(
    {"prompt_ids": Jagged.from_rows([[1, 2], [30], [7, 7, 7], [50]], np.int64)}
)


class Policy:
    """Trainer ranks that hold a plan and send nothing."""

    async def call(self, method: Any, *args: Any, timeout: float | None = None) -> Any:
        if method.__name__ == "send_weights":
            orders: list[Order] = args[0]
            return [[Outcome(order.engine, order.number, "served", rank=0) for order in orders]]
        return {"device_kind": "cpu", "open_sync_store": ("127.0.0.1", 1), "plan_weights": [PLAN]}[
            method.__name__
        ]


class World:
    """Two engines of the kind, their workers, and the driver's service and sync over them."""

    def __init__(self, folder: Path, max_restarts: int) -> None:
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({"model_type": "none"}))
        rollout = RolloutConfig(
            engine=KIND, num_engines=2, max_restarts=max_restarts, sampling=SamplingConfig(0.7)
        )
        config = RunConfig(
            output_dir=str(folder), rollout=rollout, data=DataConfig(max_response_length=3)
        )
        contexts = [
            WorkerContext(rank, 2, rank, "here", 0, "here", folder / "log") for rank in range(2)
        ]
        self.workers = [
            RolloutWorker(context, rollout, self.model, "float32", 1) for context in contexts
        ]
        group: Any = Threads(self.workers)
        policy: Any = Policy()
        self.service = EngineGroup(group, config, [])
        block_on(self.service.wait_ready())
        self.weights = SliceSync(policy, self.service, config)
        block_on(self.weights.prepare())

    def engine(self, number: int) -> Any:
        return self.workers[number].supervisor.engine

    def sync(self, version: int) -> SyncReport:
        return block_on(self.weights.sync(version))

    def answers(self, prompts: DataProto = PROMPTS, *, training: bool = True) -> DataProto:
        return block_on(self.service.answers(self.service.begin(prompts, training=training)))

    def states(self) -> list[EngineState]:
        return block_on(self.service.states())

    def settled(self) -> list[str]:
        """The states once no engine is starting any more."""
        deadline = time.monotonic() + 60.0
        while any(state.state == "starting" for state in self.states()):
            assert time.monotonic() < deadline
        return [state.state for state in self.states()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    built = World(tmp_path, max_restarts=1)
    yield built
    block_on(built.service.stop())


def test_it_answers_in_order_with_the_settings_of_training_or_validation(world: World) -> None:
    assert world.sync(5).nbytes == 16
    batch = world.answers()
    assert [row.tolist() for row in batch.jagged("response_ids")] == [
        [3, 4, 5],
        [31, 32, 33],
        [8, 9, 10],
        [51, 52, 53],
    ]
    assert set(batch.jagged("response_versions").values.tolist()) == {5}
    world.answers(training=False)
    calls = ["generate at temperature 0.7", "generate at temperature 0.0"]
    assert [world.engine(number).calls for number in (0, 1)] == [calls, calls]


def test_it_gives_its_memory_away_and_takes_it_again(world: World) -> None:
    block_on(world.service.sleep())
    block_on(world.service.wake(["weights"]))
    assert world.engine(0).calls == ["sleep", "wake ['weights']"]


def test_one_that_ended_is_replaced_and_takes_the_next_weights(world: World) -> None:
    world.sync(1)
    world.engine(0).kill()
    assert len(world.answers()) == 4 and set(world.service.stale) == {0}
    assert world.settled() == ["up", "up"]
    assert world.sync(2).stale == {} and world.engine(0).version == 2
    assert world.engine(0).log_path.name == "engine-0.1.log"


def test_one_that_was_replaced_refuses_adapters_without_the_weights(world: World) -> None:
    """The driver may have ordered them before it learned of the restart."""
    world.sync(5)
    worker = world.workers[0]
    worker.adopt_plan(PLAN.digest, "a" * 64)
    endpoint = Endpoint("p2p", "s", "127.0.0.1", 1, (0,), (0,), 2, 0.2)
    order = Order("engine-0", 0, endpoint, 2, 6, "a" * 64)
    assert worker.receive_weights(order).status == "served"
    world.engine(0).kill()
    assert world.settled()[0] == "up"
    outcome = worker.receive_weights(replace(order, attempt=3))
    assert outcome.status == "refused" and "has restarted and lacks the weights" in outcome.error
    assert worker.receive_weights(replace(order, plan=PLAN.digest)).status == "served"
    assert worker.receive_weights(replace(order, attempt=4)).status == "served"


def test_one_that_ends_more_often_within_an_hour_than_allowed_is_given_up(world: World) -> None:
    for version in (1, 2):
        world.sync(version)
        world.engine(0).kill()
        states = world.settled()
    assert states == ["failed", "up"]
    reason = world.states()[0].reason
    assert "limit rollout.max_restarts=1 per hour reached" in reason and "ended" in reason
    assert len(world.answers()) == 4


def test_a_restart_that_fails_is_told(world: World) -> None:
    world.sync(1)
    (world.model / "broken").touch()
    for number in (0, 1):
        world.engine(number).kill()
    with pytest.raises(EnginesLostError, match=r"(?s)engine-0 is \w+: .*engine-1 is \w+: "):
        world.answers()
    assert world.settled() == ["failed", "failed"]
    assert "restart failed: engine engine-0: ended" in world.states()[0].reason


def test_one_without_weights_answers_nobody(world: World) -> None:
    asked = PROMPTS.with_columns(ticket=np.arange(4), max_new_tokens=np.full(4, 3))
    world.workers[0].ask(asked, SamplingConfig(), [], NO_EXTRAS)
    batch = world.workers[0].collect(60.0)
    assert batch["ticket"].tolist() == [0, 1, 2, 3]
    assert set(batch["finish_reason"]) == {CUT_SHORT} and not batch.lengths("response_ids").any()


def test_the_others_go_on_from_the_last_token_of_one_that_is_lost(world: World) -> None:
    world.sync(5)
    engine = world.engine(0)

    def lose(prompts: Any, *_: Any, **__: Any) -> Any:
        engine.kill()
        error = EngineError("ended", engine="engine-0")
        ended = Completion([9, 9, 9], [-1.0] * 3, "stop", (WeightSpan("5", 0, 3),))
        error.begun = (ended, Completion([31], [-2.0], "abort", (WeightSpan("4", 0, 1),)))
        raise error

    engine.generate = lose
    batch = world.answers()
    assert [row.tolist() for row in batch.jagged("response_ids")] == [
        [9, 9, 9],
        [31, 32, 33],
        [8, 9, 10],
        [51, 52, 53],
    ]
    assert batch["finish_reason"].tolist() == ["stop", "length", "length", "length"]
    assert batch.jagged("response_versions").row(1).tolist() == [4, 5, 5]
    assert batch.jagged("rollout_log_probs").row(1).tolist() == [-2.0, -0.5, -0.5]
    assert batch["weight_version"].tolist() == ["5"] * 4 and set(world.service.stale) == {0}
    # its own share, and one answer's rest
    assert world.engine(1).calls.count("generate at temperature 0.7") == 2


def test_single_requests_are_aborted(world: World) -> None:
    """Under way in a call of `generate`, or in a later one, which then leaves them out; at the
    engine or in the driver."""
    world.sync(5)
    world.service.quarantine({1: "not asked"})
    engine = world.engine(0)
    generate = world.engine(0).generate
    going_on = threading.Event()
    asked: list[list[list[int]]] = []

    def wait(prompts: Any, *rest: Any, **named: Any) -> Any:
        asked.append(prompts)
        assert going_on.wait(60.0)
        return generate(prompts, *rest, **named)

    engine.generate = wait
    prompts = PROMPTS.with_columns(room=np.array([1, 2, 2, 1]))
    requests = world.service.begin(prompts, training=True)
    block_on(world.service.advance())
    block_on(world.service.abort(requests[:2]))
    going_on.set()
    batch = block_on(world.service.answers(requests[2:]))
    assert asked == [[[1, 2], [50]], [[7, 7, 7]]] and not any(one.done() for one in requests[:2])
    assert [row.tolist() for row in batch.jagged("response_ids")] == [[8, 9], [51]]
    assert batch["finish_reason"].tolist() == ["length", "length"]
    assert world.service.is_idle and not world.workers[0].requests._parts


def test_an_aborted_request_of_an_engine_that_is_lost_is_asked_nowhere_again(world: World) -> None:
    world.sync(5)
    engine = world.engine(0)
    going_on = threading.Event()

    def lose(prompts: Any, *_: Any, **__: Any) -> Any:
        assert going_on.wait(60.0)
        engine.kill()
        error = EngineError("ended", engine="engine-0")
        error.begun = tuple(
            Completion([9], [-1.0], "abort", (WeightSpan("5", 0, 1),)) for _ in prompts
        )
        raise error

    engine.generate = lose
    world.service.quarantine({1: "not asked"})
    requests = world.service.begin(PROMPTS.rows(np.array([1, 3])), training=True)
    block_on(world.service.advance())
    world.service.quarantine({})
    block_on(world.service.abort(requests[:1]))
    going_on.set()
    batch = block_on(world.service.answers(requests[1:]))
    assert batch.jagged("response_ids").row(0).tolist() == [9, 10, 11] and not requests[0].done()
    assert world.engine(1).calls == ["generate at temperature 0.7"] and world.service.is_idle


def test_an_error_of_one_that_still_runs_is_the_callers(world: World) -> None:
    world.sync(5)

    def refuse(*_: Any, **__: Any) -> Any:
        raise EngineError("too long", engine="engine-0")

    world.engine(0).generate = refuse
    with pytest.raises(EngineError, match="engine-0: too long"):
        world.answers()
    assert world.service.stale == {}


def test_one_that_hangs_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_rollout, "_SETTLE_S", 0.0)
    world.sync(5)

    def hang(*_: Any, **__: Any) -> Any:
        raise EngineSilent("no data from /generate within 3 s", engine="engine-0")

    world.engine(0).generate = hang
    assert len(world.answers()) == 4
    assert "no data from /generate within 3 s" in world.service.stale[0]
    assert world.settled() == ["up", "up"]


def test_an_unknown_kind_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine=sglan: .*did you mean 'sglang'"):
        ENGINES.get("sglan")
