"""Wait for a call on all its ranks, and turn failures into one clear error as early as possible."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import HybridFlowError, WorkerError, from_json
from hybridflow.process.children import ENDED, STOPPED, state_of
from hybridflow.single_controller.host import Failure
from hybridflow.single_controller.pieces import Header
from hybridflow.single_controller.remote_node import RemoteNode
from hybridflow.single_controller.stored import stored_results

_GRACE_S = 2.0  # a dead rank makes its peers raise; how long to look for it before blaming a peer
_NEWS_S = 30.0  # Ray reports an exited process within this time, even on a busy machine
_POLL_S = 1.0
_AT_ONCE_S = 0.2  # how long to wait for all ranks in one request, during which a single failure goes unnoticed
_STOPPED_LOOKS = 10  # polls `_POLL_S` apart; a driver suspended together with the rank polls less often
_TAIL_LINES = 40
_TAIL_BYTES = 16384
_STACK_DUMP_S = 0.5
_waited_s = 0.0


def waited_seconds() -> float:
    """Return the seconds this process has spent waiting for calls since it started.

    This is the time in which workers and engines were working.
    """
    return _waited_s


@contextmanager
def waiting() -> Iterator[None]:
    """Context manager: add the time inside to `waited_seconds`. Must not be nested."""
    global _waited_s
    start = time.monotonic()
    try:
        yield
    finally:
        _waited_s += time.monotonic() - start


@dataclass
class Rank:
    """The driver's view of one worker process."""

    actor: Any
    node: str
    log_path: Path
    remote: RemoteNode | None  # observer on the process's node; None: the process is on this machine
    pid: int = 0
    log_from: int = 0  # offset of this process's part of the log; earlier processes of the rank wrote before it

    def is_in(self, *states: str) -> bool:
        """Return whether the process is known to be in one of these states of `process.children.state_of`."""
        if not self.pid:
            return False
        return (self.remote.state(self.pid) if self.remote else state_of(self.pid)) in states

    def log_tail(self) -> str:
        """Return the last lines of the rank's log; empty if the file cannot be read from this machine."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self.log_from, log.tell() - _TAIL_BYTES))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
        except OSError:
            return ""


class Future:
    """The result of a call started by `WorkerGroup.submit`. The call runs whether or not the result is awaited."""

    def __init__(
        self,
        role: str,
        method: str,
        *,
        ranks: Sequence[Rank],
        refs: Mapping[int, Any],
        collect: Callable[[Mapping[int, Any]], Any],
        default_timeout_s: float,
        on_lost: Callable[[HybridFlowError], None] | None = None,
        stored: Mapping[int, Mapping[str, Any]] | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Track a call that has been submitted.

        Args:
            role, method, ranks: the callee, for error messages.
            refs: reference to the reply of each called rank.
            collect: combines the replies into one value.
            default_timeout_s: default timeout of `result` in seconds.
            on_lost: called when a rank died or hangs, after which its group is unusable.
            stored: for each rank whose columns stay in the object store, the object that holds each column.
            check: called about every second while `result` waits; raises if a reply can no longer arrive.
        """
        self._role, self._method, self._ranks, self._collect = role, method, ranks, collect
        self._pending = {ref: rank for rank, ref in refs.items()}
        self._results: dict[int, Any] = {}
        self._default_timeout_s, self._check = default_timeout_s, check
        self._submitted = self._looked = time.monotonic()
        self._deadline: float | None = None  # deadline used by `done`
        self._looks: dict[int, int] = {}  # consecutive polls in which each rank was found stopped
        self._called, self._ends = len(refs), list[float]()
        self._on_lost = on_lost
        self._lost = False
        self._stored = dict(stored or {})
        self._value: Any = None
        self._error: HybridFlowError | None = None
        self._finished = False

    def done(self) -> bool:
        """Return whether `result` would return or raise immediately.

        Runs the same checks as `result` does while waiting. The timeout starts with the first call.
        """
        if not self._finished:
            self._deadline = self._deadline or time.monotonic() + self._default_timeout_s
            try:
                while self._pending and self._look(0.0):
                    pass
                if self._pending and time.monotonic() > self._deadline:
                    raise self._hung()
            except HybridFlowError as error:
                self._fail(error)
        return self._finished or not self._pending

    @property
    def open_refs(self) -> list[Any]:
        """Ray references of the replies that have not been received."""
        return list(self._pending)

    @property
    def ended_at(self) -> float | None:
        """`time.perf_counter` at the last reply, if `note_end` was called before it arrived; else None."""
        return max(self._ends) if self._ends and len(self._ends) == self._called else None

    def note_end(self) -> None:
        """Record the time of the last reply even if nothing waits for it."""
        for ref in self._pending:
            ref.future().add_done_callback(lambda _: self._ends.append(time.perf_counter()))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call and return the collected value.

        Args:
            timeout: seconds to wait from now; None: the group's `call_timeout_s`.

        Raises:
            WorkerError: a rank died, raised, or did not answer in time; includes the tail of its log.
            HybridFlowError: a rank raised one of our errors: the same type, with the rank added to the message.
        """
        if not self._finished:
            try:
                self._wait(self._default_timeout_s if timeout is None else timeout)
                headers = {rank: value for rank, value in self._results.items() if isinstance(value, Header)}
                self._value = self._collect({**self._results, **stored_results(self._stored, headers)})
            except HybridFlowError as error:
                self._fail(error)
            self._finished = True
            self._results = {}
        if self._error is not None:
            raise self._error
        return self._value

    def _fail(self, error: HybridFlowError) -> None:
        """Finish the call with an error."""
        self._error, self._finished = error, True
        if self._lost and self._on_lost is not None:
            self._on_lost(error)

    @waiting()
    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._take_at_once(max(0.0, min(timeout, _AT_ONCE_S)))
        while self._pending:
            left = deadline - time.monotonic()
            if not self._look(max(0.0, min(left, _POLL_S))) and left <= 0:
                raise self._hung()

    def _look(self, within_s: float) -> bool:
        """Wait up to `within_s` for a reply. Returns whether one arrived. Raises if a rank failed or is stopped."""
        import ray

        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=within_s)
        failed = self._take(ready)
        if failed:
            raise self._first_cause(failed)
        now = time.monotonic()
        if not ready and (within_s > 0 or now - self._looked >= _POLL_S):
            self._looked = now
            self._check()
            rank = self._stopped(self._looks)
            if rank is not None:
                raise self._stands_still(rank)
        return bool(ready)

    def _stopped(self, looks: dict[int, int]) -> int | None:
        """Return a pending rank that has been in the stopped state for some time.

        `looks` counts the consecutive polls of each rank. Only the process state is used: a call may legitimately take
        long, so the lack of a reply means nothing.
        """
        for rank in self._pending.values():
            looks[rank] = looks.get(rank, 0) + 1 if self._ranks[rank].is_in(STOPPED) else 0
        return next((rank for rank, count in looks.items() if count >= _STOPPED_LOOKS), None)

    def _stands_still(self, rank: int) -> WorkerError:
        self._lost = True
        return self._worker_error("the worker process was stopped (SIGSTOP) and stands still", rank)

    def _take_at_once(self, timeout: float) -> None:
        """Fetch all replies with a single request to Ray.

        Most calls are short and succeed, and checking ranks one by one costs two requests each.
        """
        import ray

        refs = list(self._pending)
        try:
            values = ray.get(refs, timeout=timeout)
        except ray.exceptions.RayError:
            return  # some are late or a rank died: check them one by one
        failed = self._receive({self._pending.pop(ref): value for ref, value in zip(refs, values, strict=True)})
        if failed:
            raise self._first_cause(failed)

    def _take(self, ready: Sequence[Any]) -> dict[int, Failure | Exception]:
        """Move finished ranks to the results. Returns the failed ones."""
        import ray

        lost: dict[int, Failure | Exception] = {}
        values: dict[int, Any] = {}
        for ref in ready:
            rank = self._pending.pop(ref)
            try:
                values[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                lost[rank] = error
        return lost | self._receive(values)

    def _receive(self, values: Mapping[int, Any]) -> dict[int, Failure | Exception]:
        """Move the replies to the results. Returns the failures among them."""
        failed = {rank: value for rank, value in values.items() if isinstance(value, Failure)}
        self._results |= {rank: value for rank, value in values.items() if rank not in failed}
        return dict(failed)

    def _first_cause(self, failed: dict[int, Failure | Exception]) -> HybridFlowError:
        """Build one error for the whole call.

        A dead or stopped rank takes precedence, since it explains the lost connections that its peers report.
        """
        import ray

        began = time.monotonic()
        while self._pending and not any(map(_is_death, failed.values())):
            if time.monotonic() - began > (_NEWS_S if self._has_ended() else _GRACE_S):
                break
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=0.2)
            failed |= self._take(ready)
        if not any(map(_is_death, failed.values())):
            for rank in self._pending.values():
                if self._ranks[rank].is_in(STOPPED):
                    return self._stands_still(rank)
        rank = min(failed, key=lambda r: (not _is_death(failed[r]), not _is_ours(failed[r]), list(failed).index(r)))
        others = sorted(set(failed) - {rank})
        also = f"; ranks {others} failed too" if others else ""
        return self._error_of(rank, failed[rank], also)

    def _has_ended(self) -> bool:
        """Return whether the process of a pending rank has exited."""
        return any(self._ranks[rank].is_in("", ENDED) for rank in self._pending.values())

    def _error_of(self, rank: int, cause: Failure | Exception, also: str) -> HybridFlowError:
        if isinstance(cause, Failure):
            if cause.ours is not None:
                return self._same_type(rank, cause, also)
            return self._worker_error(f"{cause.kind}: {cause.message}{also}", rank)
        if _is_death(cause):
            self._lost = True
            return self._worker_error(f"the worker process died: {_how_it_died(cause)}{also}", rank)
        return self._worker_error(f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1]}{also}", rank)

    def _same_type(self, rank: int, cause: Failure, also: str) -> HybridFlowError:
        return from_json(
            cause.ours or "", f"({self._role} rank {rank} on {self._ranks[rank].node}, in {self._method}{also})"
        )

    def _hung(self) -> WorkerError:
        self._lost = True
        waiting = sorted(self._pending.values())
        listed = f"rank(s) {', '.join(map(str, waiting))} of {len(self._ranks)}"
        if not any(self._ranks[rank].pid for rank in waiting):
            return self._worker_error(
                f"the processes of {listed} have not come up. Ray gives workers a low priority, so that other work on "
                "the machine delays them: end it, set RAY_worker_niceness=0, or raise cluster.start_timeout_s",
                waiting[0],
                waited=True,
            )
        for rank in waiting:
            _dump_stack(self._ranks[rank])
        time.sleep(_STACK_DUMP_S)
        return self._worker_error(f"no answer from {listed}; stacks are in their logs", waiting[0], waited=True)

    def _worker_error(self, message: str, rank: int, waited: bool = False) -> WorkerError:
        state = self._ranks[rank]
        return WorkerError(
            message,
            role=self._role,
            rank=rank,
            node=state.node,
            method=self._method,
            waited_s=time.monotonic() - self._submitted if waited else None,
            log_tail=state.log_tail(),
        )


def _is_death(cause: Failure | Exception) -> bool:
    import ray

    return isinstance(cause, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError))


def _is_ours(cause: Failure | Exception) -> bool:
    return isinstance(cause, Failure) and cause.ours is not None


def _how_it_died(error: Exception) -> str:
    """Extract the lines of Ray's message that describe how the process exited."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
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
