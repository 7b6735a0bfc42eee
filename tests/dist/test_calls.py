"""Calls of roles on real ranks: at the same time on devices of their own, in turns on shared
ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import WorkerError
from hybridflow.observe.timeline import Timeline, read_timeline
from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup
from hybridflow.trainer.devices import Devices
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


class Calls:
    """What is called in one step."""

    def __init__(self, groups: dict[str, WorkerGroup], folder: Path) -> None:
        self.groups = groups
        self.folder = folder
        self.timeline = Timeline(folder / "timeline.jsonl")
        self.devices = Devices(POOLS.__getitem__, self.timeline)

    def call(self, role: str, method: Any, *args: Any) -> asyncio.Task[Any]:
        async def work() -> Any:
            return await self.groups[POOLS[role]].call(method, *args)

        return self.devices.call(role, role, 1, work())

    def times(self) -> dict[str, tuple[float, float]]:
        self.timeline.close()
        return {
            one["name"]: (one["start"], one["end"])
            for one in read_timeline(self.folder / "timeline.jsonl")
        }


async def test_pools_work_at_the_same_time_and_each_in_the_order_of_calling(
    groups: dict[str, WorkerGroup], tmp_path: Path
) -> None:
    calls = Calls(groups, tmp_path)
    # the first two would wait for each other for ever if one came after the other
    meeting = [
        calls.call("actor", Worker.meet, str(tmp_path), "here", "there"),
        calls.call("reference", Worker.nap, 1, 0.0),
        calls.call("critic", Worker.meet, str(tmp_path), "there", "here"),
        calls.call("reward_model", Worker.nap, 2, 0.3),
    ]
    await calls.devices.finish(*meeting)
    assert [one.done() for one in meeting] == [True] * 4
    assert meeting[0].result() == meeting[2].result() == ["met", "met"] and meeting[3].result() == [
        [2],
        [2],
    ]
    times = calls.times()
    assert max(times["actor"][0], times["critic"][0]) < min(times["actor"][1], times["critic"][1])
    for first, second in (("actor", "reference"), ("critic", "reward_model")):
        assert times[first][1] <= times[second][0] + 0.01


async def test_the_end_of_a_call_is_noted_while_nobody_waits_for_it(
    groups: dict[str, WorkerGroup], tmp_path: Path
) -> None:
    calls = Calls(groups, tmp_path)
    call = calls.call("critic", Worker.nap, 3, 0.2)
    await asyncio.sleep(0)
    assert calls.devices.is_busy("reward_model") and not calls.devices.is_busy("actor")
    deadline = time.monotonic() + 30
    while not call.done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.5)
    await calls.devices.finish(call)
    begun, ended = calls.times()["critic"]
    assert 0.2 <= ended - begun < 1.5


async def test_a_rank_that_dies_ends_the_wait_for_another_pool(
    groups: dict[str, WorkerGroup], tmp_path: Path
) -> None:
    calls = Calls(groups, tmp_path)
    slow = calls.call("actor", Worker.nap, 4, 20.0)
    dying = calls.call("critic", Worker.die_on, 1, "exit")
    start = time.monotonic()
    with pytest.raises(WorkerError, match="died") as caught:
        await calls.devices.finish(slow, dying)
    assert caught.value.role == "critic" and time.monotonic() - start < 15
    assert calls.devices.is_busy("actor") and not calls.devices.is_busy("critic")
    await calls.devices.forget()
    assert not calls.devices.is_busy("actor")
