"""Passes of roles on real ranks: at the same time on devices of their own, in turns on shared ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import WorkerError
from hybridflow.observe.timeline import Timeline, read_timeline
from hybridflow.single_controller import Cluster, Pending, ResourcePool, WorkerGroup
from hybridflow.trainer.calls import Asked, Calls
from tests.dist.harness.sc_workers import Worker

pytestmark = pytest.mark.slow
POOLS = {"actor": "actor", "reference": "actor", "critic": "critic", "reward_model": "critic"}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerGroup]]:
    config = ClusterConfig(nodes=1, procs_per_node=4, start_timeout_s=90, call_timeout_s=60)
    with Cluster.start(config, tmp_path_factory.mktemp("run")) as cluster:
        halves = ResourcePool.allocate(cluster, 1, 4).split([2, 2])
        logs = tmp_path_factory.mktemp("logs")
        yield {
            role: WorkerGroup(cluster, half, Worker, role=role, log_dir=logs)
            for role, half in zip(("actor", "critic"), halves, strict=True)
        }


class Passes:
    """What is asked of the ranks in one step."""

    def __init__(self, groups: dict[str, WorkerGroup], folder: Path) -> None:
        self.groups, self.folder = groups, folder
        self.timeline = Timeline(folder / "timeline.jsonl")
        self.calls = Calls(POOLS.__getitem__, self.timeline)

    def ask(self, role: str, method: Any, *args: Any) -> Asked[Any]:
        return self.calls.ask(role, role, 1, partial(self._begin, role, method, *args))

    def _begin(self, role: str, method: Any, *args: Any) -> Pending[Any]:
        return Pending([self.groups[POOLS[role]].submit(method, *args)], lambda found: found[0])

    def times(self) -> dict[str, tuple[float, float]]:
        self.timeline.close()
        return {one["name"]: (one["start"], one["end"]) for one in read_timeline(self.folder / "timeline.jsonl")}


def test_pools_work_at_the_same_time_and_each_in_the_order_of_asking(
    groups: dict[str, WorkerGroup], tmp_path: Path
) -> None:
    passes = Passes(groups, tmp_path)
    # the first two would wait for each other for ever if one came after the other
    meeting = [
        passes.ask("actor", Worker.meet, str(tmp_path), "here", "there"),
        passes.ask("reference", Worker.nap, 1, 0.0),
        passes.ask("critic", Worker.meet, str(tmp_path), "there", "here"),
        passes.ask("reward_model", Worker.nap, 2, 0.3),
    ]
    passes.calls.finish(*meeting)
    assert [one.ended for one in meeting] == [True] * 4
    assert meeting[0].value == meeting[2].value == ["met", "met"] and meeting[3].value == [[2], [2]]
    times = passes.times()
    assert max(times["actor"][0], times["critic"][0]) < min(times["actor"][1], times["critic"][1])
    for first, second in (("actor", "reference"), ("critic", "reward_model")):
        assert times[first][1] <= times[second][0] + 0.01


def test_the_end_of_a_pass_is_noted_while_nobody_waits_for_it(groups: dict[str, WorkerGroup], tmp_path: Path) -> None:
    passes = Passes(groups, tmp_path)
    asked = passes.ask("critic", Worker.nap, 3, 0.2)
    assert passes.calls.is_busy("reward_model") and not passes.calls.is_busy("actor")
    deadline = time.monotonic() + 30
    while not passes.calls.is_over(asked):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1.5)
    passes.calls.finish(asked)
    begun, ended = passes.times()["critic"]
    assert 0.2 <= ended - begun < 1.5


def test_a_rank_that_dies_ends_the_wait_for_another_pool(groups: dict[str, WorkerGroup], tmp_path: Path) -> None:
    passes = Passes(groups, tmp_path)
    slow = passes.ask("actor", Worker.nap, 4, 20.0)
    dying = passes.ask("critic", Worker.die_on, 1, "exit")
    start = time.monotonic()
    with pytest.raises(WorkerError, match="died") as caught:
        passes.calls.finish(slow, dying)
    assert caught.value.role == "critic" and time.monotonic() - start < 15
    assert passes.calls.is_busy("actor") and not passes.calls.is_busy("critic")
    passes.calls.forget()
    assert not passes.calls.is_busy("actor")
