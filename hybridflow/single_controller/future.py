"""Waiting for a call to finish on all of its ranks. Failures are reported as early as possible, and
as a single error.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.errors import HybridFlowError, WorkerError, from_json
from hybridflow.observe import spans
from hybridflow.process.children import ENDED, STOPPED, state_of
from hybridflow.single_controller.event_loop import block_on
from hybridflow.single_controller.host import Failure
from hybridflow.single_controller.remote_node import RemoteNode
from hybridflow.single_controller.stored import Header, stored_results

_GRACE_S = (
    2.0  # a dead rank makes its peers raise errors; time to look for it before a peer is blamed
)
_NEWS_S = 30.0  # Ray reports an exited process within this time, even on a busy machine
_POLL_S = 1.0
_NEWS_POLL_S = 0.2
# polls at intervals of `_POLL_S`; a driver suspended together with the rank polls less often
_STOPPED_LOOKS = 10
_TAIL_LINES = 40
_TAIL_BYTES = 16384
_STACK_DUMP_S = 0.5


@dataclass
class Rank:
    """The driver's view of one worker process."""

    actor: Any
    node: str
    log_path: Path
    # observer on the process's node; None: the process is on this machine
    remote: RemoteNode | None
    pid: int = 0
    # offset of this process's part of the log; earlier processes of the rank wrote before it
    log_from: int = 0
    _methods: dict[tuple[str, int], Any] = field(default_factory=dict)

    def send(self, name: str, *args: Any, num_returns: int = 1) -> Any:
        """Call a method of the actor. Returns a reference to its result, or a list of `num_returns`
        references."""
        key = (name, num_returns)
        if key not in self._methods:  # Ray builds a method in about the time of a call
            self._methods[key] = getattr(self.actor, name).options(num_returns=num_returns)
        return self._methods[key].remote(*args)

    def is_in(self, *states: str) -> bool:
        """Return True if the process is known to be in one of these states (see
        `process.children.state_of`)."""
        if not self.pid:
            return False
        return (self.remote.state(self.pid) if self.remote else state_of(self.pid)) in states

    def log_tail(self) -> str:
        """Return the last lines of the rank's log; empty if the file cannot be read from this
        machine."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self.log_from, log.tell() - _TAIL_BYTES))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
        except OSError:
            return ""


class Future:
    """A call on the ranks of a group, made by `WorkerGroup.call`. Awaiting it returns the collected
    value.

    The call runs whether or not it is awaited, and may be awaited several times. Its timeout starts
    with the first wait.
    """

    def __init__(
        self,
        role: str,
        method: str,
        *,
        ranks: Sequence[Rank],
        refs: Mapping[int, Any],
        collect: Callable[[Mapping[int, Any]], Any],
        timeout_s: float,
        on_lost: Callable[[HybridFlowError], None] | None = None,
        stored: Mapping[int, Mapping[str, Any]] | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Track a call that has been sent.

        Args:
            role, method, ranks: the callee, for error messages.
            refs: object reference to each called rank's reply.
            collect: combines the replies into one value.
            timeout_s: maximum wait for the replies.
            on_lost: called if a rank has died or hangs, so that its group is unusable.
            stored: for each rank whose columns stay in the object store, the object that contains
                each column.
            check: called about every second while the call is awaited; raises an error if a reply
                can no longer arrive.
        """
        self._role = role
        self._method = method
        self._ranks = ranks
        self._collect = collect
        self._replies = {rank: ref.future() for rank, ref in refs.items()}
        self._open = set(refs)  # ranks whose reply has not been read
        self._results: dict[int, Any] = {}
        self._timeout_s = timeout_s
        self._check = check
        self._called_at = time.monotonic()
        self._looks: dict[int, int] = {}  # consecutive polls in which each rank was found stopped
        self._on_lost = on_lost
        self._lost = False
        self._stored = dict(stored or {})
        self._waiting: asyncio.Task[Any] | None = None
        self._arrived = asyncio.Event()
        self._told: list[int] = []  # ranks whose reply has arrived since the last `_read`
        self._value: Any = None
        self._error: HybridFlowError | None = None
        self._is_over = False

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call from code outside an event loop, and return the collected value.

        Args:
            timeout: seconds to wait from now; None for the group's `call_timeout_s`.

        Raises:
            WorkerError: a rank died, raised an exception, or did not reply in time. The message
                includes the tail of its log.
            HybridFlowError: a rank raised this error. It is re-raised with the same type, and the
                rank is added to the message.
        """
        if timeout is not None:
            self._timeout_s = timeout
        return block_on(self)

    def done(self) -> bool:
        """Return True if all ranks have replied or the call has failed."""
        return self._is_over or all(reply.done() for reply in self._replies.values())

    async def _result(self) -> Any:
        if not self._is_over:
            if self._waiting is None or self._waiting.get_loop() is not asyncio.get_running_loop():
                self._waiting = asyncio.ensure_future(self._wait())
            # cancelling one waiter stops neither the ranks nor other waiters
            await asyncio.shield(self._waiting)
        if self._error is not None:
            raise self._error
        return self._value

    async def _wait(self) -> None:
        """Wait for all replies, then set the call's value or error."""
        self._listen()
        try:
            await self._receive_all(time.monotonic() + self._timeout_s)
            headers = {}
            for rank, value in self._results.items():
                if isinstance(value, Header):
                    headers[rank] = value
            self._value = self._collect({**self._results, **stored_results(self._stored, headers)})
        except HybridFlowError as error:
            self._error = error
            if self._lost and self._on_lost is not None:
                self._on_lost(error)
        self._is_over = True
        self._results = {}

    async def _receive_all(self, deadline: float) -> None:
        while self._open:
            left = deadline - time.monotonic()
            has_news = await self._news(max(0.0, min(left, _POLL_S)))
            failed = self._read()
            if failed:
                raise await self._first_cause(failed)
            if has_news:
                continue
            if left <= 0:
                raise await self._hung()
            self._check()
            rank = self._stopped(self._looks)
            if rank is not None:
                raise self._stopped_error(rank)

    async def _news(self, within_s: float) -> bool:
        """Wait up to `within_s` for a reply. Returns True if one has arrived."""
        # a timer, because `asyncio.wait_for` creates a task for each wait
        timer = asyncio.get_running_loop().call_later(within_s, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            timer.cancel()
        self._arrived.clear()
        return bool(self._told)

    def _listen(self) -> None:
        """Register callbacks so that each reply, including replies already received, sets
        `_arrived`.
        """
        loop = asyncio.get_running_loop()
        self._arrived = arrived = asyncio.Event()
        self._told = told = list[int]()

        def note(rank: int) -> None:
            told.append(rank)
            arrived.set()

        def tell(rank: int, _: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(note, rank)

        for rank, reply in self._replies.items():
            reply.add_done_callback(partial(tell, rank))

    def _read(self) -> dict[int, Failure | Exception]:
        """Move received replies into the results, and return the failures among them."""
        failed: dict[int, Failure | Exception] = {}
        arrived = sorted(self._open.intersection(self._told))
        self._told.clear()
        for rank in arrived:
            reply = self._replies[rank]
            self._open.discard(rank)
            error = reply.exception()
            if isinstance(error, Exception):
                failed[rank] = error
            elif isinstance(reply.result(), Failure):
                failed[rank] = reply.result()
            else:
                self._results[rank] = reply.result()
        return failed

    def _stopped(self, looks: dict[int, int]) -> int | None:
        """Return a pending rank whose process has been stopped for some time. `looks` counts, for
        each rank, the consecutive polls in that state. Only the process state is used, because a
        healthy call may take a long time to reply.
        """
        for rank in self._open:
            looks[rank] = looks.get(rank, 0) + 1 if self._ranks[rank].is_in(STOPPED) else 0
        return next((rank for rank, count in looks.items() if count >= _STOPPED_LOOKS), None)

    def _stopped_error(self, rank: int) -> WorkerError:
        self._lost = True
        return self._worker_error("the worker process is stopped (SIGSTOP)", rank)

    async def _first_cause(self, failed: dict[int, Failure | Exception]) -> HybridFlowError:
        """Build one error for the whole call.

        A dead or stopped rank takes precedence, because it explains the lost connections reported
        by its peers.
        """
        began = time.monotonic()
        while self._open and not any(map(_is_death, failed.values())):
            if time.monotonic() - began > (_NEWS_S if self._has_ended() else _GRACE_S):
                break
            await self._news(_NEWS_POLL_S)
            failed |= self._read()
        if not any(map(_is_death, failed.values())):
            for rank in sorted(self._open):
                if self._ranks[rank].is_in(STOPPED):
                    return self._stopped_error(rank)
        rank = min(
            failed,
            key=lambda r: (
                not _is_death(failed[r]),
                not _is_ours(failed[r]),
                list(failed).index(r),
            ),
        )
        others = sorted(set(failed) - {rank})
        also = f"; ranks {others} also failed" if others else ""
        return self._error_of(rank, failed[rank], also)

    def _has_ended(self) -> bool:
        """Return True if the process of a pending rank has exited."""
        return any(self._ranks[rank].is_in("", ENDED) for rank in self._open)

    def _error_of(self, rank: int, cause: Failure | Exception, also: str) -> HybridFlowError:
        if isinstance(cause, Failure):
            if cause.ours is not None:
                return self._same_type(rank, cause, also)
            return self._worker_error(f"{cause.kind}: {cause.message}{also}", rank)
        if _is_death(cause):
            self._lost = True
            return self._worker_error(f"the worker process died: {_how_it_died(cause)}{also}", rank)
        return self._worker_error(
            f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1]}{also}", rank
        )

    def _same_type(self, rank: int, cause: Failure, also: str) -> HybridFlowError:
        return from_json(
            cause.ours or "",
            f"({self._role} rank {rank} on {self._ranks[rank].node}, in {self._method}{also})",
        )

    async def _hung(self) -> WorkerError:
        self._lost = True
        waiting = sorted(self._open)
        listed = f"rank(s) {', '.join(map(str, waiting))} of {len(self._ranks)}"
        if (file := spans.current()) is not None:
            file.mark(f"no answer from {listed} of {self._role} in {self._method}")
        if not any(self._ranks[rank].pid for rank in waiting):
            return self._worker_error(
                f"the processes of {listed} have not started. Ray runs workers at low priority, so "
                "other load on the machine delays them: stop it, set RAY_worker_niceness=0, or "
                "raise cluster.start_timeout_s",
                waiting[0],
                waited=True,
            )
        for rank in waiting:
            _dump_stack(self._ranks[rank])
        await asyncio.sleep(_STACK_DUMP_S)
        return self._worker_error(
            f"no answer from {listed}; stacks are in their logs", waiting[0], waited=True
        )

    def _worker_error(self, message: str, rank: int, waited: bool = False) -> WorkerError:
        state = self._ranks[rank]
        return WorkerError(
            message,
            role=self._role,
            rank=rank,
            node=state.node,
            method=self._method,
            waited_s=time.monotonic() - self._called_at if waited else None,
            log_tail=state.log_tail(),
        )


def _is_death(cause: Failure | Exception) -> bool:
    import ray

    return isinstance(cause, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError))


def _is_ours(cause: Failure | Exception) -> bool:
    return isinstance(cause, Failure) and cause.ours is not None


def _how_it_died(error: Exception) -> str:
    """Extract the lines of Ray's error message that describe how the process exited."""
    lines = list(filter(None, map(str.strip, str(error).splitlines())))
    telling = [line for line in lines if "exit" in line.lower() or "kill" in line.lower()]
    return " ".join((telling or lines[-1:])[:2])


def _dump_stack(rank: Rank) -> None:
    """Have the rank's faulthandler dump the stacks of all threads to its log."""
    if not rank.pid:
        return
    if rank.remote is not None:
        rank.remote.dump_stacks([rank.pid])
        return
    try:
        os.kill(rank.pid, signal.SIGUSR1)
    except ProcessLookupError:
        rank.pid = 0  # it has exited in the meantime
