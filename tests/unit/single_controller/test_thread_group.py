"""Workers in the driver's process: the same dispatch as in separate ones, in order, with deadlines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridflow.dispatch import Dispatch, WorkerContext, register
from hybridflow.errors import EngineError, WorkerError
from hybridflow.single_controller import ThreadGroup, block_on


class Worker:
    def __init__(self, context: WorkerContext, word: str) -> None:
        if context.rank == 3:
            raise EngineError("no room")
        self.rank = context.rank
        self.world_size = context.world_size
        self.log_path = context.log_path
        self.word = word
        self.calls: list[int] = []
        self.threads: set[int] = set()

    @register(Dispatch.ONE_TO_ALL)
    def tell(self, number: int, wait_s: float = 0.0) -> str:
        time.sleep(wait_s)
        self.calls.append(number)
        self.threads.add(threading.get_ident())
        return f"{self.word}{self.rank}"

    @register(Dispatch.ALL_TO_ALL)
    def double(self, value: int) -> int:
        return 2 * value

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise EngineError(f"{self.rank} failed")


def group(folder: Path, count: int = 3) -> ThreadGroup:
    made = ThreadGroup(Worker, role="w", args=("a",), log_dir=folder)
    made.add(count)
    return made


async def results(awaitables: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*awaitables))


def test_calls_are_dispatched_and_answered_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    made = group(tmp_path)
    assert made.world_size == 3 and made.is_alive()
    assert block_on(made.call(Worker.tell, 1)) == ["a0", "a1", "a2"]
    assert block_on(made.call(Worker.tell, 2, only=[2, 0])) == ["a2", "a0"]
    assert block_on(made.call(Worker.double, [1, 2, 3])) == [2, 4, 6]
    assert block_on(made.call(Worker.double, [5, 7], only=[2, 1])) == [10, 14]
    assert [one.log_path.name for one in made.workers] == [f"w-rank{n}.log" for n in range(3)]
    assert {one.world_size for one in made.workers} == {3}


def test_the_calls_of_a_worker_are_made_in_order_and_those_of_several_at_once(
    tmp_path: Path,
) -> None:
    made = group(tmp_path)
    begun = time.monotonic()
    slow = made.call(Worker.tell, 0, 0.3)
    later = [made.call(Worker.tell, number) for number in range(1, 20)]
    assert not slow.done() and time.monotonic() - begun < 0.2
    block_on(results(later))
    assert slow.done() and time.monotonic() - begun < 0.8
    for one in made.workers:
        assert one.calls == list(range(20)) and len(one.threads) == 1
    assert len(set.union(*(one.threads for one in made.workers))) == 3


def test_an_error_of_a_worker_is_the_callers_and_a_late_one_is_named(tmp_path: Path) -> None:
    made = group(tmp_path)
    with pytest.raises(EngineError, match="failed"):
        block_on(made.call(Worker.fail))
    with pytest.raises(WorkerError, match=r"tell did not return within 0.05 s"):
        block_on(made.call(Worker.tell, 0, 0.5, timeout=0.05))
    assert block_on(made.call(Worker.double, [1, 2, 3], timeout=5)) == [2, 4, 6]


def test_workers_from_before_an_error_are_known_and_threads_end(tmp_path: Path) -> None:
    made = ThreadGroup(Worker, role="ends", args=("a",), log_dir=tmp_path)
    with pytest.raises(EngineError, match="no room"):
        made.add(4)
    assert len(made.workers) == 3
    made.close()
    deadline = time.monotonic() + 5
    while any(one.name.startswith("ends-") for one in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
