"""The driver's event loop, and calls that are awaited in it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridflow.errors import WorkerError
from hybridflow.single_controller import block_on, event_loop, in_thread, waited_seconds
from hybridflow.single_controller.event_loop import cancel_all, end_tasks
from hybridflow.single_controller.host import Failure
from tests.unit.single_controller.replies import Reply, call_of


async def rounds(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_who_stops_waiting_for_a_call_drops_the_result_alone() -> None:
    """The ranks go on, others who wait get the value, and so does who asks later."""
    reply = Reply()
    call = call_of({0: reply})

    async def value() -> object:
        return await call

    first = asyncio.ensure_future(value())
    second = asyncio.ensure_future(value())
    await rounds()
    first.cancel()
    await rounds()
    assert first.cancelled() and not second.done() and not call.done()
    reply.set_result("found")
    assert call.done() and await second == await call == {0: "found"}


async def test_an_error_is_that_of_everybody_who_waits() -> None:
    reply = Reply()
    call = call_of({0: reply})

    async def value() -> object:
        return await call

    waiting = [asyncio.ensure_future(value()) for _ in range(3)]
    await rounds()
    reply.set_result(Failure("ValueError", "no", None))
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in found] == [WorkerError] * 3 and {str(one) for one in found} == {
        str(found[0])
    }
    with pytest.raises(WorkerError, match="ValueError: no"):
        await call


def test_a_reply_is_there_before_anybody_waits() -> None:
    replies = Reply(), Reply()
    call = call_of(dict(enumerate(replies)))
    replies[1].set_result("b")
    assert not call.done()
    replies[0].set_result("a")
    assert call.done() and call.result() == call.result() == {0: "a", 1: "b"}


def test_waiting_is_refused_where_it_would_hold_the_loop(recwarn: pytest.WarningsRecorder) -> None:
    async def inner() -> None:
        raise AssertionError("it began")

    async def outer() -> None:
        with pytest.raises(RuntimeError, match="await the call instead"):
            block_on(inner())
        with pytest.raises(RuntimeError, match="await the call instead"):
            call_of({0: Reply()}).result()

    block_on(outer())
    assert [str(one.message) for one in recwarn if "never awaited" in str(one.message)] == []


def test_tasks_go_on_while_a_later_call_is_waited_for() -> None:
    done = list[str]()

    async def aside() -> None:
        await rounds(5)
        done.append("aside")

    async def begin() -> asyncio.Task[None]:
        return asyncio.ensure_future(aside())

    task = block_on(begin())
    assert done == []
    block_on(rounds(20))
    assert done == ["aside"] and task.done()


def test_each_thread_waits_in_a_loop_of_its_own() -> None:
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with ThreadPoolExecutor(1) as pool:
        loops = {
            id(block_on(loop())),
            id(block_on(loop())),
            id(pool.submit(lambda: block_on(loop())).result()),
        }
    assert len(loops) == 2


def test_an_interrupt_ends_the_wait_and_what_waits_with_it() -> None:
    ends = list[str]()

    async def work() -> None:
        try:
            threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
            await call_of({0: Reply()})
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        block_on(work())
    assert ends == ["cancelled"]
    assert block_on(asyncio.sleep(0, "the loop goes on")) == "the loop goes on"


def test_a_task_that_ignores_its_cancellation_holds_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an agent loop of a user's may, with `except:` in a loop."""
    monkeypatch.setattr(event_loop, "_CANCEL_S", 0.1)
    cancelled = list[int]()
    may_end = asyncio.Event()

    async def stubborn() -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                cancelled.append(1)

    async def begin() -> asyncio.Task[None]:
        task = asyncio.ensure_future(stubborn())
        await rounds()
        return task

    task = block_on(begin())
    cancel_all([task])
    assert cancelled == [1] and not task.done()
    may_end.set()
    block_on(task)


def test_ended_tasks_do_not_go_on_with_the_next_wait() -> None:
    ends = list[str]()

    async def call() -> None:
        try:
            await call_of({0: Reply()}, timeout_s=0.1)
        except BaseException as error:
            ends.append(type(error).__name__)
            raise

    async def begin() -> asyncio.Task[None]:
        task = asyncio.ensure_future(call())
        await rounds()
        return task

    task = block_on(begin())
    end_tasks()
    assert task.cancelled() and ends == ["CancelledError"]
    block_on(asyncio.sleep(0.3))
    assert ends == ["CancelledError"]


async def test_blocking_work_holds_neither_the_loop_nor_who_gave_it_up() -> None:
    go_on = threading.Event()
    entered = threading.Event()

    def work() -> str:
        entered.set()
        assert go_on.wait(60)
        return "done"

    kept = asyncio.ensure_future(in_thread(work))
    given_up = asyncio.ensure_future(in_thread(work))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    given_up.cancel()
    await rounds()
    assert given_up.cancelled() and not kept.done()
    go_on.set()
    assert await kept == "done"
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


def test_only_idle_time_counts_as_waited() -> None:
    async def busy() -> float:
        before = waited_seconds()
        for _ in range(200_000):
            pass
        return waited_seconds() - before

    async def idle() -> float:
        before = waited_seconds()
        await asyncio.sleep(0.05)
        return waited_seconds() - before

    assert block_on(busy()) == 0.0 and block_on(idle()) > 0.0


@pytest.mark.slow
def test_a_fork_has_a_loop_of_its_own_and_leaves_that_of_its_parent_alone() -> None:
    """One fork after another waits for threads, as the parent does before and after."""
    code = """
        import os, sys, time
        from hybridflow.single_controller import block_on, in_thread

        def waits():
            assert block_on(in_thread(lambda: time.sleep(0.2) or 3)) == 3

        waits()
        for _ in range(2):
            child = os.fork()
            if child == 0:
                waits()
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            waits()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
