"""Observation and control of processes on another node, through an actor that reads process states,
requests stack dumps and kills processes there. Neither a stopped process nor one that computes for
minutes replies. Only the process state distinguishes the two, and it can be read only on the same
machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hybridflow.process.children import end_processes, state_of

_ASK_S = 5.0  # interval between queries
_FRESH_S = 8.0  # older replies are considered stale
_ANSWER_S = 10.0  # timeout of a query whose reply is needed


class _Observer:
    """The actor that runs on the observed node."""

    def states(self, pids: Sequence[int]) -> dict[int, str]:
        """Return the state of each process (`process.children.state_of`)."""
        return {pid: state_of(pid) for pid in pids}

    def dump_stacks(self, pids: Sequence[int]) -> None:
        """Have each process's faulthandler dump the stacks of all threads to its log."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def end(self, pids: Sequence[int]) -> None:
        """Wait for the processes to exit, and kill those that do not exit in time."""
        end_processes(pids)


class RemoteNode:
    """The driver's handle to another node. The actor on that node is started once a call has taken
    several seconds."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._observer: Any = None
        self._pids: set[int] = set()  # processes queried since the last request
        self._asked: Any = None
        self._asked_at = time.monotonic()
        self._as_of = float("-inf")
        self._states: Mapping[int, str] = {}

    def state(self, pid: int) -> str | None:
        """Return a process's state, which may be a few seconds old, or None before the first reply.
        Never blocks.
        """
        self._take_answer()
        now = time.monotonic()
        if self._asked is None and self._pids and now - self._asked_at >= _ASK_S:
            self._asked = self._actor().states.remote(sorted(self._pids))
            self._asked_at = now
            self._pids = set()
        self._pids.add(pid)
        return self._states.get(pid) if now - self._as_of < _FRESH_S else None

    def dump_stacks(self, pids: Sequence[int]) -> None:
        """Have these processes dump their stacks to their logs. Gives up if the node does not reply
        within a few seconds."""
        self._done(self._actor().dump_stacks.remote(list(pids)))

    def end(self, pids: Sequence[int]) -> None:
        """Wait for these processes to exit, and send SIGKILL to those that do not, because Ray
        alone does not kill a stopped process.
        """
        if self._observer is not None:
            self._done(self._observer.end.remote(list(pids)))

    def _take_answer(self) -> None:
        import ray

        if self._asked is None or not ray.wait([self._asked], timeout=0)[0]:
            return
        try:
            self._states = ray.get(self._asked)
            self._as_of = self._asked_at
        except ray.exceptions.RayError:
            self._states = {}  # the node or its actor is lost, which Ray reports to the call itself
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
            options = ray.remote(_Observer).options(
                num_cpus=0, max_restarts=-1, scheduling_strategy=here
            )
            self._observer = options.remote()
        return self._observer
