"""What `RestartingRollouts` decides: what starts again, with which weights, how often, and which errors are none of its
business."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.errors import EngineError, EnginesLostError, HybridFlowError, WeightSyncError, WorkerError
from hybridflow.rollout.protocols import SyncReport, answers
from hybridflow.rollout.recovery import RestartingRollouts
from hybridflow.rollout.service import EngineGroup

PROMPTS = DataProto.from_columns({})
ANSWERS = DataProto.from_columns({}, meta={"answered": True})
LOST = EnginesLostError(
    "no engine is left that could answer: engine-0 is starting: ended with status 137\n  - the long story"
)
DEAD = WorkerError("the worker process died", role="rollout", rank=0)


class World:
    """Engines and sync in one. `deeds` are what the next calls of poll and sync do: an error, or None for
    success."""

    def __init__(self, *deeds: HybridFlowError | None) -> None:
        self.answered = False
        self.deeds, self.calls, self.alive, self.said = list(deeds), [], True, []  # type: ignore[var-annotated]

    def _next(self) -> None:
        error = self.deeds.pop(0) if self.deeds else None
        if error is not None:
            self.alive = not (isinstance(error, WorkerError) and error.role == "rollout")
            raise error

    def submit(self, prompts: DataProto, *, training: bool, begun: DataProto | None = None) -> list[int]:
        return [0]

    def poll(self) -> None:
        self.calls.append("poll")
        self._next()
        self.answered = True

    def ended(self, tickets: Iterable[int]) -> bool:
        return self.answered

    def take(self, tickets: Sequence[int]) -> DataProto:
        return ANSWERS

    def shown(self, tickets: Sequence[int]) -> DataProto:
        return ANSWERS

    def begun(self, tickets: Sequence[int]) -> DataProto | None:
        return None

    def abort(self, tickets: Sequence[int], *, keep: bool = False) -> None:
        self.calls.append(f"abort {list(tickets)} keep={keep}")
        self._next()

    def forget(self) -> None:
        self.calls.append("forget")

    def sync(self, version: int) -> SyncReport:
        self.calls.append(f"sync {version}")
        self._next()
        return SyncReport(version, 0.0, 1, {})

    def workers_alive(self) -> bool:
        return self.alive

    def restart_workers(self) -> None:
        self.calls.append("restart")
        self.alive = True

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self, tags: Sequence[str]) -> None:
        self.calls.append(f"wake {list(tags)}")


def rollouts_of(world: Any, max_restarts: int = 1) -> RestartingRollouts:
    rollouts = RestartingRollouts(world, world, max_restarts, world.said.append)
    assert rollouts.sync(7).version == 7
    return rollouts


def test_while_all_is_well_it_is_not_there() -> None:
    world = World()
    rollouts = rollouts_of(world, 0)
    assert answers(rollouts, PROMPTS, training=True) is ANSWERS
    rollouts.sleep()
    rollouts.wake(["weights"])
    rollouts.forget()
    assert world.calls == ["sync 7", "poll", "sleep", "wake ['weights']", "forget"] and world.said == []


def test_what_a_lost_worker_was_asked_is_aborted_with_it() -> None:
    world = World(None, DEAD, None, WorkerError("a rank died", role="actor", rank=0))
    rollouts = rollouts_of(world)
    rollouts.abort([3], keep=True)
    assert not world.alive and world.calls[1:] == ["abort [3] keep=True"]
    world.restart_workers()
    rollouts.abort([4])
    with pytest.raises(WorkerError):
        rollouts.abort([5])


def test_a_lost_engine_gets_the_weights_it_had_and_the_prompts_again() -> None:
    world = World(None, LOST)
    assert answers(rollouts_of(world), PROMPTS, training=True) is ANSWERS
    assert world.calls == ["sync 7", "poll", "sync 7", "poll"]
    assert world.said == ["no engine is left that could answer: engine-0 is starting: ended with status 137"]


def test_a_lost_worker_starts_again_before_the_weights_go_out() -> None:
    world = World(None, DEAD)
    assert answers(rollouts_of(world), PROMPTS, training=True) is ANSWERS
    assert world.calls == ["sync 7", "poll", "restart", "sync 7", "poll"]


def test_a_worker_lost_in_a_sync_costs_that_sync_alone() -> None:
    world = World(None, DEAD)
    assert rollouts_of(world).sync(8).version == 8
    assert world.calls == ["sync 7", "sync 8", "restart", "sync 8"]


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_restarts_are_counted(allowed: int) -> None:
    world = World(None, *[error for _ in range(5) for error in (LOST, None)])
    with pytest.raises(EnginesLostError):
        answers(rollouts_of(world, allowed), PROMPTS, training=True)
    assert world.calls.count("poll") == 1 + allowed == len(world.said) + 1


def test_a_restart_that_fails_ends_it() -> None:
    world = World(None, LOST, WeightSyncError("no engine could take it"))
    with pytest.raises(WeightSyncError):
        answers(rollouts_of(world, 5), PROMPTS, training=True)
    assert world.calls.count("poll") == 1


@pytest.mark.parametrize(
    "error", [EngineError("/generate answered 400"), WorkerError("no answer", role="actor", rank=3)]
)
def test_other_errors_are_none_of_its_business(error: HybridFlowError) -> None:
    for call in ("poll", "sync"):
        world = World(None, error)
        rollouts = rollouts_of(world, 5)
        with pytest.raises(type(error)):
            answers(rollouts, PROMPTS, training=True) if call == "poll" else rollouts.sync(8)
        assert len(world.calls) == 2 and world.said == []


class Workers:
    """A worker group of one role: what is done to it is noted in `calls`; one that is dead fails every call."""

    world_size = 1

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role, self.calls, self.alive = role, calls, True

    def submit(self, method: Any, *args: Any, timeout: float | None = None) -> None:
        self.calls.append(f"{self.role} {method.__name__}")

    def run(self, method: Any, *args: Any, timeout: float | None = None) -> list[str]:
        self.submit(method)
        if not self.alive:
            raise WorkerError("the worker process died", role=self.role, rank=0)
        return [self.role]

    def is_alive(self) -> bool:
        return self.alive

    def restart(self) -> None:
        self.calls.append(f"{self.role} restart")
        self.alive = True


@pytest.mark.parametrize("dead", [(), ("rollout",), ("rollout-node",), ("rollout", "rollout-node")])
def test_workers_on_all_nodes_of_an_engine_are_asked_for_and_start_again(dead: tuple[str, ...]) -> None:
    calls: list[str] = []
    groups: Any = {role: Workers(role, calls) for role in ("rollout", "rollout-node")}
    engines = EngineGroup(groups["rollout"], RunConfig(), [], groups["rollout-node"])
    for role in dead:
        groups[role].alive = False
    assert engines.workers_alive() == (not dead)
    calls.clear()
    if dead:
        with pytest.raises(WorkerError) as raised:
            engines.states()
        # the other node's first: its loss explains why an engine cannot start again
        assert raised.value.role == dead[-1]
    else:
        assert engines.states() == ["rollout"]
    calls.clear()
    engines.restart_workers()
    # the first nodes lead, so they come last; workers of other nodes that live follow the new ones
    assert calls == [*(f"{role} restart" for role in ("rollout-node",) if role in dead), "rollout restart"]
    assert engines.workers_alive()
