"""The processes of another node: an actor there reads their states, asks for their stacks and ends them.

A process that was stopped answers nothing, but neither does one that computes for minutes. Its state tells them apart,
and only its own machine knows that.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hybridflow.process.children import end_processes, state_of

_ASK_S = 5.0  # between two questions
_FRESH_S = 8.0  # an answer to an older question says nothing about now
_ANSWER_S = 10.0  # how long an answer is waited for where something depends on it


class _Observer:
    """What runs on the other node."""

    def states(self, pids: Sequence[int]) -> dict[int, str]:
        """The state of each process (`process.children.state_of`)."""
        return {pid: state_of(pid) for pid in pids}

    def dump_stacks(self, pids: Sequence[int]) -> None:
        """Ask each process' faulthandler for the stacks of all threads; they go to its log."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def end(self, pids: Sequence[int]) -> None:
        """Wait until the processes have ended, and kill those that do not."""
        end_processes(pids)


class RemoteNode:
    """One other node, as the driver sees it. The actor there is started when a call has lasted for some seconds."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._observer: Any = None
        self._pids: set[int] = set()  # those that were looked at since the last question
        self._asked: Any = None
        self._asked_at, self._as_of = time.monotonic(), float("-inf")
        self._states: Mapping[int, str] = {}

    def state(self, pid: int) -> str | None:
        """The state of a process some seconds ago; None while the node has not said it. It never waits."""
        self._take_answer()
        now = time.monotonic()
        if self._asked is None and self._pids and now - self._asked_at >= _ASK_S:
            self._asked, self._asked_at = self._actor().states.remote(sorted(self._pids)), now
            self._pids = set()
        self._pids.add(pid)
        return self._states.get(pid) if now - self._as_of < _FRESH_S else None

    def dump_stacks(self, pids: Sequence[int]) -> None:
        """Have the stacks of these processes written to their logs, if the node answers within some seconds."""
        self._done(self._actor().dump_stacks.remote(list(pids)))

    def end(self, pids: Sequence[int]) -> None:
        """Wait until these processes have ended; those that are left get SIGKILL. Ray alone leaves one that was
        stopped."""
        if self._observer is not None:
            self._done(self._observer.end.remote(list(pids)))

    def _take_answer(self) -> None:
        import ray

        if self._asked is None or not ray.wait([self._asked], timeout=0)[0]:
            return
        try:
            self._states, self._as_of = ray.get(self._asked), self._asked_at
        except ray.exceptions.RayError:
            self._states = {}  # the node, or the actor there, is lost: Ray says so to the call itself
        self._asked = None

    def _done(self, answer: Any) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            ray.get(answer, timeout=_ANSWER_S)

    def _actor(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._observer is None:
            here = NodeAffinitySchedulingStrategy(self.node_id, soft=False)
            options = ray.remote(_Observer).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            self._observer = options.remote()
        return self._observer
