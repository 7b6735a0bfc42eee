"""Calls of roles on pools of devices: order, one failure, cancelled waits, calls that are
dropped."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.observe.timeline import Timeline, read_timeline
from hybridflow.trainer.devices import Devices
from tests.unit.single_controller.replies import Reply, call_of

POOLS = {"actor": "actor", "reference": "actor", "critic": "critic", "reward_model": "critic"}
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def devices(tmp_path: Path) -> Devices:
    return Devices(POOLS.__getitem__, Timeline(tmp_path / "timeline.jsonl"))


async def rounds(count: int = 50) -> None:
    """Let the event loop do all that can be done now."""
    for _ in range(count):
        await asyncio.sleep(0)


async def answer_of(reply: Reply) -> Any:
    return await call_of({0: reply})


async def failing(after: int, error: Exception) -> None:
    await rounds(after)
    raise error


def lost(role: str) -> WorkerError:
    return WorkerError("the worker process died", role=role, rank=0, node="here", method="update")


@pytest.mark.parametrize("seed", range(5))
async def test_calls_of_a_pool_run_one_at_a_time_in_the_order_of_calling(
    devices: Devices, seed: int
) -> None:
    """Whichever task wakes first, and however long each takes; other pools work meanwhile."""
    drawn = random.Random(seed)
    called = list[int]()
    events = list[tuple[str, int]]()
    roles = dict[int, str]()

    async def work(number: int, count: int) -> int:
        events.append(("begin", number))
        await rounds(count)
        events.append(("end", number))
        return number

    async def caller() -> None:
        for _ in range(12):
            await rounds(drawn.randrange(4))
            number = len(called)
            called.append(number)
            roles[number] = drawn.choice(list(POOLS))
            call = devices.call(roles[number], "pass", 1, work(number, drawn.randrange(5)))
            if drawn.random() < 0.5:
                assert await devices.result(call) == number

    await asyncio.gather(*[caller() for _ in range(5)])
    for role in ("actor", "critic"):
        await devices.finish_pool(role)
        own = [(event, number) for event, number in events if POOLS[roles[number]] == role]
        wanted = [number for number in called if POOLS[roles[number]] == role]
        assert own == [(event, number) for number in wanted for event in ("begin", "end")]
        assert not devices.is_busy(role)
    pools = [POOLS[roles[number]] for event, number in events if event == "begin"]
    ends = [POOLS[roles[number]] for event, number in events if event == "end"]
    # a pass began in one pool before one that began earlier in the other ended
    assert pools != ends


async def test_pools_work_at_the_same_time(devices: Devices) -> None:
    here = asyncio.Event()
    there = asyncio.Event()

    async def meet(own: asyncio.Event, other: asyncio.Event) -> str:
        own.set()
        await other.wait()
        return "met"

    calls = (
        devices.call("actor", "a", 1, meet(here, there)),
        devices.call("critic", "b", 1, meet(there, here)),
    )
    await devices.finish(*calls)
    assert [call.result() for call in calls] == ["met", "met"]


async def test_who_stops_waiting_drops_the_result_alone(devices: Devices) -> None:
    """The pool stays taken until the ranks have answered, and only then the next call of it
    begins."""
    reply = Reply()
    begun = list[str]()

    async def next_one() -> str:
        begun.append("next")
        return "later"

    call = devices.call("actor", "a", 1, answer_of(reply))
    later = devices.call("reference", "b", 1, next_one())
    waiting = [
        asyncio.ensure_future(wait) for wait in (devices.result(call), devices.finish_pool("actor"))
    ]
    await rounds()
    for one in waiting:
        one.cancel()
    await rounds()
    assert all(one.cancelled() for one in waiting) and not call.done()
    assert devices.is_busy("reference") and begun == []
    reply.set_result("found")
    assert await devices.result(later) == "later" and await devices.result(call) == {0: "found"}


@pytest.mark.parametrize(("slow", "fast"), [("actor", "critic"), ("critic", "actor")])
async def test_of_several_calls_that_fail_the_first_cause_is_raised_and_once(
    devices: Devices, slow: str, fast: str
) -> None:
    """Both have failed before the waiter goes on."""
    calls = {
        role: devices.call(role, role, 1, failing(3 if role == slow else 2, lost(role)))
        for role in (slow, fast)
    }
    calls |= {"waits": devices.call(fast, "later", 1, answer_of(Reply()))}
    asyncio.get_running_loop().call_soon(lambda: None)
    await rounds()
    with pytest.raises(WorkerError) as caught:
        await devices.finish(calls[slow])
    assert caught.value.role == fast
    await devices.finish()
    await devices.finish(calls[fast], calls[slow])
    await devices.forget()


async def test_a_call_that_fails_ends_the_wait_for_another_pool(devices: Devices) -> None:
    slow = devices.call("actor", "a", 1, answer_of(Reply()))
    dying = devices.call("critic", "b", 1, failing(3, lost("x")))
    with pytest.raises(HybridFlowError, match="died"):
        await devices.finish(slow)
    assert dying.done() and devices.is_busy("actor") and not devices.is_busy("critic")
    await devices.forget()


async def test_what_was_dropped_never_runs_later(devices: Devices, tmp_path: Path) -> None:
    """No call that waited begins, none that ran goes on or is recorded later, and no call after it
    waits for them."""
    begun = list[str]()

    async def work(name: str, reply: Reply) -> Any:
        begun.append(name)
        found = await answer_of(reply)
        begun.append(f"{name} goes on")
        return found

    replies = [Reply() for _ in range(3)]
    dropped = [
        devices.call("actor", f"pass{n}", 7, work(f"pass{n}", reply))
        for n, reply in enumerate(replies)
    ]
    await rounds()
    # no round has passed since
    dropped.append(devices.call("critic", "unbegun", 7, work("unbegun", Reply())))
    await devices.forget()
    assert all(call.cancelled() for call in dropped) and begun == ["pass0"]
    assert not devices.is_busy("actor") and not devices.is_busy("critic")
    recorded = (tmp_path / "timeline.jsonl").read_text()
    assert await devices.result(
        devices.call("reference", "again", 1, work("again", _answered()))
    ) == {0: None}
    for reply in replies:
        reply.set_result("late")
    await rounds()
    assert begun == ["pass0", "again", "again goes on"]
    added = (tmp_path / "timeline.jsonl").read_text().removeprefix(recorded)
    assert [re.search(r'"name": "(\w+)"', line)[1] for line in added.splitlines()] == ["again"]  # type: ignore[index]


def _answered() -> Reply:
    reply = Reply()
    reply.set_result(None)
    return reply


async def test_phases_of_tasks_nest_by_task(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    devices = Devices(POOLS.__getitem__, timeline)

    async def work(name: str, count: int) -> None:
        with timeline.phase(name):
            await rounds(count)
            with timeline.phase("inner"):
                await rounds(count)

    async def side(name: str, step: int, count: int) -> None:
        with timeline.phase("step", step):
            call = devices.call(name, f"update_{name}", step, work("own", count))
            with timeline.phase("gen"):
                await rounds(7)
                with timeline.phase("wait"):
                    await devices.finish(call)

    await asyncio.gather(side("actor", 1, 5), side("critic", 2, 3))
    timeline.close()
    found = sorted(
        (one["step"], one["name"], one["depth"])
        for one in read_timeline(tmp_path / "timeline.jsonl")
    )
    assert found == sorted(
        (step, name, depth)
        for step, role in ((1, "actor"), (2, "critic"))
        for name, depth in [
            ("step", 0),
            (f"update_{role}", 1),
            ("own", 1),
            ("own/inner", 2),
            ("gen", 1),
            ("gen/wait", 2),
        ]
    )


Script = Coroutine[Any, Any, None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["failures", "interrupts"])
def test_nothing_is_reported_by_python_of_calls_that_fail_or_are_interrupted(
    name: str, tmp_path: Path
) -> None:
    """Neither exceptions that nobody retrieved, nor coroutines or tasks that were left."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m"]
    command += ["tests.unit.trainer.abandoned_calls", name, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "all is over"
