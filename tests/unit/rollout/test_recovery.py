"""What `RestartingSync` decides: what starts again, with which weights, how often, and which errors
are none of its business."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import RunConfig
from hybridflow.engines.base import Completion
from hybridflow.errors import (
    EngineError,
    EnginesLostError,
    HybridFlowError,
    WeightSyncError,
    WorkerError,
)
from hybridflow.rollout.protocols import SyncReport
from hybridflow.rollout.requests import Requests
from hybridflow.rollout.service import EngineGroup
from hybridflow.rollout.weight_sync import RestartingSync
from hybridflow.single_controller import block_on
from hybridflow.workers.rollout import response_columns

PROMPTS = DataProto.from_columns({"prompt_ids": Jagged.from_rows([[1]], np.int64)})
LOST = EnginesLostError(
    "no engine is left to serve requests: engine-0 is starting: ended with status 137\n  - the "
    "long story"
)
DEAD = WorkerError("the worker process died", role="rollout", rank=0)


class World(Requests):
    """Engines and sync in one. `deeds` are what the next calls of `_collect` and `sync` do: an
    error, or None for success."""

    def __init__(self, *deeds: HybridFlowError | None) -> None:
        super().__init__(RunConfig())
        self.deeds, self.calls, self.alive, self.said = list(deeds), [], True, []  # type: ignore[var-annotated]

    def _next(self) -> None:
        error = self.deeds.pop(0) if self.deeds else None
        if error is not None:
            self.alive = not (isinstance(error, WorkerError) and error.role == "rollout")
            raise error

    def _serving(self) -> Sequence[int]:
        return [0]

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        assert self.alive

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        self.calls.append("poll")
        self._next()
        answer = response_columns([Completion([5], [0.0], "stop", ())])
        return [answer.with_columns(ticket=np.array(list(self._under_way)))]

    async def sync(self, version: int) -> SyncReport:
        self.calls.append(f"sync {version}")
        self._next()
        return SyncReport(version, 0.0, 1, {})

    def workers_alive(self) -> bool:
        return self.alive

    async def restart_workers(self) -> None:
        self.calls.append("restart")
        self.alive = True
        self._ask_again()

    async def _unused(self, *_: Any) -> Any:
        raise RuntimeError("the recovery calls nothing else")

    _so_far = _leave_out_lost = _abort = _forget = sleep = wake = _unused


def sync_of(world: Any, max_restarts: int = 1) -> RestartingSync:
    weights = RestartingSync(world, world, max_restarts, world.said.append)
    assert block_on(weights.sync(7)).version == 7
    return weights


def answered(world: World, max_restarts: int = 1) -> bool:
    """Whether the prompt is answered by engines that start again as often as this."""
    sync_of(world, max_restarts)
    found = block_on(world.answers(world.begin(PROMPTS, training=True)))
    return found.jagged("response_ids").row(0).tolist() == [5]


def test_while_all_is_well_it_is_not_there() -> None:
    world = World()
    assert answered(world, 0)
    assert world.calls == ["sync 7", "poll"] and world.said == []


def test_a_lost_engine_gets_the_weights_it_had_and_the_prompts_again() -> None:
    world = World(None, LOST)
    assert answered(world)
    assert world.calls == ["sync 7", "poll", "sync 7", "poll"]
    assert world.said == [
        "no engine is left to serve requests: engine-0 is starting: ended with status 137"
    ]


def test_a_lost_worker_starts_again_before_the_weights_go_out() -> None:
    world = World(None, DEAD)
    assert answered(world)
    assert world.calls == ["sync 7", "poll", "restart", "sync 7", "poll"]


def test_a_worker_lost_in_a_sync_costs_that_sync_alone() -> None:
    world = World(None, DEAD)
    assert block_on(sync_of(world).sync(8)).version == 8
    assert world.calls == ["sync 7", "sync 8", "restart", "sync 8"]


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_restarts_are_counted(allowed: int) -> None:
    world = World(None, *[error for _ in range(5) for error in (LOST, None)])
    with pytest.raises(EnginesLostError):
        answered(world, allowed)
    assert world.calls.count("poll") == 1 + allowed == len(world.said) + 1


def test_a_restart_that_fails_ends_it() -> None:
    world = World(None, LOST, WeightSyncError("no engine received it"))
    with pytest.raises(WeightSyncError):
        answered(world, 5)
    assert world.calls.count("poll") == 1


@pytest.mark.parametrize(
    "error",
    [EngineError("/generate returned status 400"), WorkerError("no answer", role="actor", rank=3)],
)
def test_other_errors_are_none_of_its_business(error: HybridFlowError) -> None:
    for call in ("poll", "sync"):
        world = World(None, error)
        with pytest.raises(type(error)):
            answered(world, 5) if call == "poll" else block_on(sync_of(world, 5).sync(8))
        assert len(world.calls) == 2 and world.said == []


class Reply:
    """A call of a worker group that has ended."""

    def __init__(self, role: str, error: WorkerError | None) -> None:
        self.role = role
        self.error = error

    def __await__(self) -> Generator[None, None, list[str]]:
        yield from ()
        if self.error is not None:
            raise self.error
        return [self.role]


class Workers:
    """A worker group of one role: what is done to it is noted in `calls`; one that is dead fails
    every call, and another whose next call has an `error` fails that one."""

    world_size = 1

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role = role
        self.calls = calls
        self.alive = True
        self.error: WorkerError | None = None

    def call(self, method: Any, *args: Any, **settings: Any) -> Reply:
        self.calls.append(f"{self.role} {method.__name__}")
        error = self.error
        self.error = None
        if not self.alive:
            error = WorkerError("the worker process died", role=self.role, rank=0)
        return Reply(self.role, error)

    def is_alive(self) -> bool:
        return self.alive

    async def restart(self) -> None:
        self.calls.append(f"{self.role} restart")
        self.alive = True


def test_what_a_lost_worker_was_asked_is_aborted_with_it() -> None:
    calls: list[str] = []
    workers: Any = Workers("rollout", calls)
    engines = EngineGroup(workers, RunConfig(), [])
    engines.quarantine({})
    requests = engines.begin(DataProto.concat([PROMPTS] * 3), training=True)
    block_on(engines._send())
    calls.clear()
    block_on(engines.abort(requests[:1]))
    workers.alive = False
    block_on(engines.abort(requests[1:2]))
    workers.alive, workers.error = True, WorkerError("a rank died", role="actor", rank=0)
    with pytest.raises(WorkerError):
        block_on(engines.abort(requests[2:]))
    assert calls == ["rollout abort_requests"] * 3


@pytest.mark.parametrize("dead", [(), ("rollout",), ("rollout-node",), ("rollout", "rollout-node")])
def test_workers_on_all_nodes_of_an_engine_are_asked_for_and_start_again(
    dead: tuple[str, ...],
) -> None:
    calls: list[str] = []
    groups: Any = {role: Workers(role, calls) for role in ("rollout", "rollout-node")}
    engines = EngineGroup(groups["rollout"], RunConfig(), [], groups["rollout-node"])
    for role in dead:
        groups[role].alive = False
    assert engines.workers_alive() == (not dead)
    calls.clear()
    if dead:
        with pytest.raises(WorkerError) as raised:
            block_on(engines.states())
        # the other node's first: its loss explains why an engine cannot start again
        assert raised.value.role == dead[-1]
    else:
        assert block_on(engines.states()) == ["rollout"]
    calls.clear()
    block_on(engines.restart_workers())
    # the first nodes lead, so they come last; workers of other nodes that live follow the new ones
    assert calls == [
        *(f"{role} restart" for role in ("rollout-node",) if role in dead),
        "rollout restart",
    ]
    assert engines.workers_alive()
