"""How one process wakes another that waits for shared memory to change: a pipe, watched together with the other's
process.

A sleep would be too long for a wait of microseconds and too short for one of seconds. A pipe can be opened by another
process through `/proc/PID/fd/N`, which an eventfd cannot.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from hybridflow.sync.transports.meeting import PeerWatch

_SPIN_S = 5e-5  # going to sleep and being woken costs about as much
_LOOK_S = 0.1  # longest sleep: a session that is given up by another thread of this process wakes nobody


def make_pipes() -> list[int]:
    """Descriptors of the two pipes of a pair: what the sender reads and writes, what the receiver reads and writes."""
    (sender_reads, receiver_writes), (receiver_reads, sender_writes) = (
        os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)
    )
    return [sender_reads, sender_writes, receiver_reads, receiver_writes]


def open_pipes(process: int, receiver: Sequence[int]) -> tuple[int, int]:
    """The receiver's two descriptors, opened by its own process. Raises OSError if the sender's process does not let
    it."""
    reads = os.open(f"/proc/{process}/fd/{receiver[0]}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return reads, os.open(f"/proc/{process}/fd/{receiver[1]}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        os.close(reads)
        raise


class Bell:
    """One side's end; owns its two descriptors."""

    def __init__(self, reads: int, writes: int, watch: PeerWatch) -> None:
        self._fds = [reads, writes]
        # a session may be given up by another thread: a closed number may be another file's by then
        self._lock = threading.Lock()
        self._watch = watch
        self._poll = select.poll()
        self._poll.register(reads, select.POLLIN)
        if watch.fd >= 0:
            self._poll.register(watch.fd, select.POLLIN)

    def ring(self) -> None:
        """Wake the other side, now or when it next waits."""
        # full: it will wake anyway; broken: nobody is there
        with (
            self._lock,
            suppress(BlockingIOError, BrokenPipeError),
        ):
            if self._fds:
                os.write(self._fds[1], b"\0")

    def wait(self, is_ready: Callable[[], bool], deadline: float) -> bool:
        """Whether it `is_ready`; returns when the other side rings or its process has ended, and before the `deadline`
        (monotonic)."""
        if _spin(is_ready):
            return True
        self._poll.poll(min(max(deadline - time.monotonic(), 0), _LOOK_S) * 1000)
        with self._lock, suppress(BlockingIOError):
            if self._fds:
                os.read(self._fds[0], 1 << 16)
        return is_ready()

    def close(self) -> None:
        """Let go of the pipes; twice is safe."""
        with self._lock:
            fds, self._fds = self._fds, []
            for fd in fds:
                os.close(fd)


def _spin(is_ready: Callable[[], bool]) -> bool:
    end = time.monotonic() + _SPIN_S
    while not is_ready():
        if time.monotonic() > end:
            return False
        os.sched_yield()
    return True
