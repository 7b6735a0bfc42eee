"""Noticing that Ray itself is lost: its processes on this machine, or the cluster that was joined, are looked at every
second, and as soon as one of the processes ends.

Ray's own client waits for a dead gcs for a minute and then aborts the driver, and for a stopped one for ever. Here the
main thread is interrupted wherever it waits, as by Ctrl-C, and `Cluster` says why when it is left. Only inside of Ray's
C++ code, which hears no signal, it cannot be interrupted; such a driver is ended.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from hybridflow.process.children import STOPPED, is_running, state_of

_POLL_S = 1.0
_STOPPED_LOOKS = 10  # a process that stands still for so many looks is lost; a driver that was suspended too looks less
_FAILED_LOOKS = 3
_CONNECT_S = 2.0
_DEAF_S = 15.0  # a main thread that has not heard a signal by then is in a call that does not return


class Watch:
    """Looks in a thread until `stop`, or until something is lost.

    Args:
        watched: what can be lost.
        keep: called at each look, to replace what can be replaced; returns the processes that `keep` would replace.
    """

    def __init__(self, watched: Watched, keep: Callable[[], Sequence[int]] = tuple) -> None:
        self._watched, self._keep, self._lost, self._over = watched, keep, "", threading.Event()
        self._noticed: set[int] = set()  # processes that have ended
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)  # readable once the thread is to end
        # a signal that nobody else uses: its handler raises in the main thread, also while that waits for Ray
        self._heard = threading.Event()
        self._before = signal.signal(signal.SIGUSR2, self._interrupt) if _in_main_thread() else None
        self._thread = threading.Thread(target=self._watch, name="watch-ray", daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """What is lost, in words; empty when all is well."""
        return self._lost or self._watched.ended()

    def interrupted_over(self) -> str:
        """What the main thread was interrupted over; empty when it was not."""
        return self._lost if self._heard.is_set() else ""

    def stop(self) -> None:
        """Look no more, and interrupt nobody."""
        self._lost = self.lost()
        self._over.set()
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        if self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)

    def _watch(self) -> None:
        kept: Sequence[int] = ()
        while not self._over.is_set():
            with suppress(OSError):  # no process or file can be made now: the next look tries again
                kept = self._keep()
            self._lost = self._watched.ended() or self._watched.silent()
            if self._lost:
                ours = self._before is not None and signal.getsignal(signal.SIGUSR2) == self._interrupt
                if ours and not self._over.is_set():  # without the handler the signal would end this process
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
                    if not self._heard.wait(_DEAF_S):
                        self._end()
                return
            self._wait(kept)

    def _interrupt(self, number: int, frame: object) -> None:
        self._heard.set()
        raise KeyboardInterrupt

    def _end(self) -> None:
        """End the process; a local cluster's guard clears up behind it, as after a SIGKILL."""
        text = f"hybridflow: {self._lost}; the driver waited for it in a call that cannot be interrupted and was ended"
        print(f"{text}; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
        os._exit(1)

    def _wait(self, kept: Sequence[int]) -> None:
        """Wait until the next look is due, a process ends (which is noticed once), or `stop` is called."""
        fresh = [pid for pid in (*self._watched.pids(), *kept) if pid not in self._noticed]
        if all(map(is_running, fresh)):  # else one has ended since the look
            with _ends_of(fresh) as ends:
                poll = select.poll()
                for descriptor in (self._stop, *ends):
                    poll.register(descriptor, select.POLLIN)
                poll.poll(_POLL_S * 1000)
        self._noticed.update(pid for pid in fresh if not is_running(pid))


@contextmanager
def _ends_of(pids: Sequence[int]) -> Iterator[list[int]]:
    """Descriptors that are readable once the processes have ended."""
    descriptors: list[int] = []
    try:
        for pid in pids:
            with suppress(OSError):  # it has ended meanwhile, or no descriptor is left: the next look is not far
                descriptors.append(os.pidfd_open(pid))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Watched(Protocol):
    """What can be lost."""

    def pids(self) -> Sequence[int]:
        """The processes whose end is to be noticed at once."""

    def ended(self) -> str:
        """What has ended, in words."""

    def silent(self) -> str:
        """What has not answered for some time, in words; called once in each look."""


class Processes:
    """Processes of this machine, by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids, self._stopped = pids, dict.fromkeys(pids, 0)

    def pids(self) -> Sequence[int]:
        """All of them."""
        return list(self._pids.values())

    def ended(self) -> str:
        """The first that has ended."""
        for name, pid in self._pids.items():
            if state_of(pid) in ("", "Z"):
                return f"Ray's {name} (process {pid}) has ended"
        return ""

    def silent(self) -> str:
        """The first that was stopped some time ago."""
        for name, pid in self._pids.items():
            self._stopped[name] = self._stopped[name] + 1 if state_of(pid) == STOPPED else 0
            if self._stopped[name] >= _STOPPED_LOOKS:
                return f"Ray's {name} (process {pid}) was stopped and stands still"
        return ""


class Starting:
    """Processes that are being started: one that ran once should not have ended.

    Args:
        running: those that there are now, by name. What there was before, of an earlier cluster, is not looked at.
        timeout_s: how long the start may take, from now on.
    """

    def __init__(self, running: Callable[[], Mapping[str, int]], timeout_s: float) -> None:
        self._running, self._seen = running, dict[str, int]()
        self._before = frozenset(running().values())
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s

    def pids(self) -> Sequence[int]:
        """The processes that were seen."""
        return list(self._seen.values())

    def ended(self) -> str:
        """The first that has ended."""
        self._seen |= {name: pid for name, pid in self._running().items() if pid not in self._before}
        return Processes(self._seen).ended()

    def silent(self) -> str:
        """That the start takes longer than it may."""
        if time.monotonic() < self._deadline:
            return ""
        return f"Ray has not answered within cluster.start_timeout_s={self._timeout_s:g}"


class Address:
    """The gcs of a cluster that was joined, at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._address, self._failures = address, 0

    def pids(self) -> Sequence[int]:
        """None: the gcs is elsewhere."""
        return ()

    def ended(self) -> str:
        """Nothing: one failed connection says little."""
        return ""

    def silent(self) -> str:
        """Whether it has taken no connection for some time."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            self._failures = 0
        except OSError as error:
            self._failures += 1
            if self._failures >= _FAILED_LOOKS:
                return f"Ray's gcs at {self._address} takes no connections: {error}"
        return ""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
