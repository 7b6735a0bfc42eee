"""The host process of the reward pool. It loads the scoring code once, forks the worker processes,
distributes rows among them, and kills and replaces workers that exceed the deadline.

`python -m hybridflow.rewards.host SOCKET` exchanges JSON lines over an inherited socket. It first
receives the `reward` section and replies with {"ready": data sources} or {"refused": text}. It then
replies to each {"id": n, "rows": [...]} with {"id": n, "outcomes": [...]}, in any order.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import HybridFlowError
from hybridflow.process.children import die_with_parent
from hybridflow.rewards.functions import Outcome, Scoring
from hybridflow.rewards.lines import Lines, connection_of, decoded, encoded

ASYNC_CALLS = 64  # concurrent calls of an async function per process
# queue depth of the search for a call with a known ground truth, and the maximum times a call is
# overtaken
_NEAR = 16
# an async call is cancelled at its deadline, unless the function blocks the event loop
_ASYNC_GRACE_S = 2.0


@dataclass
class _Job:
    """A queued or running call and its rows."""

    number: int
    rows: list[Any]
    begun: float = 0.0
    overtaken: int = 0  # later calls that were started first

    @property
    def truth(self) -> tuple[Any, Any]:
        """The data source and ground truth of the call's first row."""
        return self.rows[0][0], self.rows[0][2]


@dataclass
class _Process:
    """A worker process and its current calls."""

    pid: int
    lines: Lines
    jobs: dict[int, _Job] = field(default_factory=dict)
    truth: Any = None  # `_Job.truth` of its previous call


class Host:
    """Distributes rows among the worker processes until the driver closes its end of the
    connection.

    Args:
        driver: the connection to the driver.
        scoring: the scoring code.
        processes: number of processes.
        timeout_s: time limit for a call.
    """

    def __init__(self, driver: Lines, scoring: Scoring, processes: int, timeout_s: float) -> None:
        self.driver = driver
        self.scoring = scoring
        self.timeout_s = timeout_s
        self.waiting: deque[_Job] = deque()
        self.events = selectors.DefaultSelector()
        self.processes: list[_Process] = []
        self._limit_s = timeout_s + (_ASYNC_GRACE_S if scoring.is_async else 0.0)
        driver.socket.setblocking(False)
        self.events.register(driver.socket, selectors.EVENT_READ)
        for _ in range(processes):
            self._start()

    def serve(self) -> None:
        """Handle calls until the driver closes the connection."""
        while True:
            for key, mask in self.events.select(self._patience()):
                if not mask & selectors.EVENT_READ:
                    continue
                if key.data is not None:
                    self._receive(key.data)
                else:
                    messages = self.driver.received()
                    if messages is None:
                        return
                    self.waiting.extend(
                        _Job(message["id"], message["rows"]) for message in messages
                    )
            self._kill_late()
            self._give()
            self._flush(self.driver, None)
            for process in self.processes:
                self._flush(process.lines, process)

    def _flush(self, lines: Lines, data: _Process | None) -> None:
        """Send as much as possible without blocking. If unsent data remains, ask the selector to
        report when the connection becomes writable."""
        unsent = selectors.EVENT_WRITE if lines.flush() else 0
        self.events.modify(lines.socket, selectors.EVENT_READ | unsent, data)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        host = os.getpid()
        pid = os.fork()
        if not pid:
            die_with_parent(host)
            os.setsid()  # its children are killed with it
            for key in list(self.events.get_map().values()):
                os.close(key.fd)
            ours.close()
            code = 1
            try:
                if self.scoring.is_async:
                    asyncio.run(_score_many(theirs, self.scoring, self.timeout_s))
                else:
                    _score(theirs, self.scoring)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        ours.setblocking(False)
        process = _Process(pid, Lines(ours))
        self.processes.append(process)
        self.events.register(ours, selectors.EVENT_READ, process)

    def _patience(self) -> float | None:
        """Return the number of seconds until the next deadline, or None if no call is running."""
        begun = []
        for process in self.processes:
            begun += [job.begun for job in process.jobs.values()]
        return max(min(begun) + self._limit_s - time.monotonic(), 0.0) if begun else None

    def _give(self) -> None:
        capacity = ASYNC_CALLS if self.scoring.is_async else 1
        while self.waiting:
            process = min(self.processes, key=lambda process: len(process.jobs))
            if len(process.jobs) >= capacity:
                return
            job = self._next(process)
            job.begun, process.truth = time.monotonic(), job.truth
            process.jobs[job.number] = job
            process.lines.queue({"id": job.number, "rows": job.rows})

    def _next(self, process: _Process) -> _Job:
        """Pop the next call for a process from the queue.

        Verifiers cache parsed ground truths, so calls with the same ground truth as the process's
        previous call are preferred, followed by calls whose ground truth is not in use by another
        process.
        """
        near = list(itertools.islice(self.waiting, _NEAR))
        others = [other.truth for other in self.processes if other is not process and other.jobs]
        found = 0
        if not self.scoring.is_async and near[0].overtaken < _NEAR:
            own = (number for number, job in enumerate(near) if job.truth == process.truth)
            free = (number for number, job in enumerate(near) if job.truth not in others)
            found = next(itertools.chain(own, free), 0)
        for job in near[:found]:
            job.overtaken += 1
        del self.waiting[found]
        return near[found]

    def _receive(self, process: _Process) -> None:
        messages = process.lines.received() if process in self.processes else []
        if messages is None:
            status = self._end(process)
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            for job in process.jobs.values():
                self._fail(job, f"the process scoring it exited ({how})")
            return
        for message in messages:
            if process.jobs.pop(message["id"], None) is not None:
                self.driver.queue(message)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for process in list(self.processes):
            late = [job for job in process.jobs.values() if now >= job.begun + self._limit_s]
            if not late:
                continue
            self._end(process)
            for job in process.jobs.values():
                if job in late:
                    self._fail(job, late_text(self.timeout_s))
                else:  # blocked by another call in the same event loop
                    self.waiting.appendleft(job)

    def _end(self, process: _Process) -> int:
        """Kill a process and its descendants and start a replacement. Returns its exit code."""
        self.events.unregister(process.lines.socket)
        process.lines.socket.close()
        self.processes.remove(process)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        _, status = os.waitpid(process.pid, 0)
        self._start()
        return os.waitstatus_to_exitcode(status)

    def _fail(self, job: _Job, text: str) -> None:
        self.driver.queue({"id": job.number, "outcomes": [{"failure": text} for _ in job.rows]})


def late_text(timeout_s: float) -> str:
    """Return the failure message for a call that exceeded its time limit."""
    return f"no score within {timeout_s:g} s (reward.timeout_s)"


def _score(connection: socket.socket, scoring: Scoring) -> None:
    """Main loop of a worker process: handle calls one at a time."""
    for line in connection.makefile("rb"):
        message = decoded(line)
        connection.sendall(_answer(message["id"], scoring.outcomes(message["rows"])))


async def _score_many(connection: socket.socket, scoring: Scoring, timeout_s: float) -> None:
    """Main loop of a worker process for an async function: handle calls concurrently."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 30)
    at_work: set[asyncio.Task[None]] = set()

    async def answer(message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                outcomes = await scoring.outcomes_while_others_wait(message["rows"])
        except TimeoutError:
            outcomes = [{"failure": late_text(timeout_s)} for _ in message["rows"]]
        writer.write(_answer(message["id"], outcomes))
        await writer.drain()

    while line := await reader.readline():
        task = asyncio.create_task(answer(decoded(line)))
        at_work.add(task)
        task.add_done_callback(at_work.discard)


def _answer(number: int, outcomes: list[Outcome]) -> bytes:
    try:
        return encoded({"id": number, "outcomes": outcomes})
    except (ValueError, RecursionError) as error:
        failure = {"failure": f"the reward's return value is not plain data: {error}"}
        return encoded({"id": number, "outcomes": [failure] * len(outcomes)})


def main(argv: Sequence[str]) -> None:
    """Run the host on the connection at this file descriptor."""
    driver = connection_of(argv)
    orders = driver.first()
    if orders is None:
        return
    try:
        config = RewardConfig(
            **{**orders["config"], "verifiers": tuple(orders["config"]["verifiers"])}
        )
        scoring = Scoring(config)
    except HybridFlowError as error:
        driver.send({"refused": str(error)})
        return
    facts = {"by_group": scoring.by_group, "facts": sorted(scoring.facts)}
    driver.send({"ready": scoring.sources, **facts})
    Host(driver, scoring, orders["processes"], config.timeout_s).serve()


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1:])
