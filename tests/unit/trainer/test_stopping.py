"""A run stops where the program that started it wants to do something, and goes on as if it had
not."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from hybridflow.api.place import OwnThread, Place, place_for_caller
from hybridflow.single_controller import block_on
from hybridflow.trainer.stopping import Stops


async def work(stops: Stops, done: list[str]) -> int:
    """Three steps with a stop after each."""
    try:
        for step in range(3):
            await asyncio.sleep(0)
            done.append(f"step {step}")
            await stops.stop()
    finally:
        done.append("end")
    return len(done)


def test_work_goes_on_from_stop_to_stop() -> None:
    stops, done = Stops(enabled=True), list[str]()
    steps = stops.follow(work(stops, done))
    for step in range(3):
        next(steps)
        assert done == [f"step {one}" for one in range(step + 1)]
        # other work of the loop may be done at a stop, and does not release it
        assert block_on(asyncio.sleep(0.01, "other")) == "other"
        assert len(done) == step + 1
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert ended.value.value == 4 and done[-1] == "end"


def test_without_stops_work_goes_through() -> None:
    stops, done = Stops(), list[str]()
    with pytest.raises(StopIteration) as ended:
        next(stops.follow(work(stops, done)))
    assert ended.value.value == 4


@pytest.mark.parametrize("error", [None, ValueError("of the program"), KeyboardInterrupt()])
def test_work_that_is_given_up_ends_in_order(error: BaseException | None) -> None:
    stops, done = Stops(enabled=True), list[str]()
    steps = stops.follow(work(stops, done))
    next(steps)
    if error is None:
        steps.close()
    else:
        with pytest.raises(type(error)):
            steps.throw(error)
    assert done == ["step 0", "end"]


def test_an_error_of_the_work_is_raised_where_it_is_waited_for() -> None:
    stops = Stops(enabled=True)

    async def fail() -> None:
        await stops.stop()
        raise ValueError("of a role")

    steps = stops.follow(fail())
    next(steps)
    with pytest.raises(ValueError, match="of a role"):
        next(steps)


def test_a_thread_of_its_own_only_where_a_loop_runs() -> None:
    async def inside() -> Place:
        return place_for_caller()

    assert type(place_for_caller()) is Place
    place = asyncio.run(inside())
    assert isinstance(place, OwnThread)
    with pytest.raises(ValueError, match="of the work"):
        place.run(lambda: block_on(_fails()))
    name = place.run(lambda: threading.current_thread().name)
    assert name == "hybridflow-run" != threading.current_thread().name
    place.close()


async def _fails() -> None:
    raise ValueError("of the work")


def test_an_interrupt_of_the_caller_reaches_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridflow.api import place as module

    place = OwnThread()
    begun = threading.Event()
    waits = iter([True])

    def wait(futures: object) -> None:
        if next(waits, False):
            assert begun.wait(60)
            raise KeyboardInterrupt
        time.sleep(0.01)

    monkeypatch.setattr(module, "wait", wait)

    async def endless() -> None:
        begun.set()
        await asyncio.sleep(3600)

    with pytest.raises(KeyboardInterrupt):
        place.run(lambda: block_on(endless()))
    # one that comes when the work has ended is raised by `check`, and ends no other work
    waits = iter([True])
    begun.clear()

    def quick() -> str:
        begun.set()
        return "whole"

    assert place.run(quick) == "whole"
    with pytest.raises(KeyboardInterrupt):
        place.check()
    assert place.run(lambda: block_on(asyncio.sleep(0.05, "next"))) == "next"
    place.check()
    place.close()
