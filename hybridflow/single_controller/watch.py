"""Detection of the loss of Ray itself, and of a local cluster's guard.

The local Ray processes and the guard, or the address of a joined cluster, are checked every second
and whenever one of the processes exits.

Ray's own client waits a minute for a dead gcs and then aborts the driver; for a stopped gcs it
waits forever. The watchdog instead interrupts the main thread, like Ctrl-C, and `Cluster` raises an
error with the reason on exit. Ray's C++ code does not handle signals, so if the main thread is
stuck there, the driver process is terminated.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from hybridflow.process.children import STOPPED, is_running, state_of
from hybridflow.single_controller import guard

_POLL_S = 1.0
# a process stopped for this many polls is lost; a driver that was suspended too polls less often
_STOPPED_LOOKS = 10
_FAILED_LOOKS = 3
_CONNECT_S = 2.0
# a main thread that does not handle a signal within this time is in a call that never returns
_DEAF_S = 15.0
_AGAIN_S = 0.5


class Watch:
    """A watchdog thread that runs until `stop` is called or a component is lost.

    Args:
        watched: the components to monitor.
        keep: called on each poll to replace helper processes if necessary (`Guard.keep`). Returns
            the pids of the helpers, whose exit also triggers a poll.
    """

    def __init__(self, watched: Watched, keep: Callable[[], Sequence[int]] = tuple) -> None:
        self._watched = watched
        self._keep = keep
        self._lost = ""
        self._over = threading.Event()
        self._noticed: set[int] = set()  # processes known to have exited
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)  # becomes readable when the thread should stop
        # SIGUSR2 is otherwise unused. Its handler raises in the main thread, even while that thread
        # waits for Ray.
        self._heard = threading.Event()
        self._before = signal.signal(signal.SIGUSR2, self._interrupt) if _in_main_thread() else None
        self._thread = threading.Thread(target=self._watch, name="watch-ray", daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """Return a description of the lost component, or an empty string if none was lost."""
        return self._lost or self._watched.ended()

    def interrupted_over(self) -> str:
        """Return the reason why the main thread was interrupted; empty if it was not."""
        return self._lost if self._heard.is_set() else ""

    def stop(self) -> None:
        """Stop the thread. Afterwards the main thread is no longer interrupted."""
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
            # OSError: no process or file can be created right now; the next poll retries
            with suppress(OSError):
                kept = self._keep()
            self._lost = self._watched.ended() or self._watched.silent()
            if self._lost:
                ours = (
                    self._before is not None and signal.getsignal(signal.SIGUSR2) == self._interrupt
                )
                # without our handler, the signal would kill this process
                if ours and not self._over.is_set():
                    self._interrupt_main()
                return
            self._wait(kept)

    def _interrupt_main(self) -> None:
        """Signal the main thread repeatedly until it handles the signal. A signal that arrives just
        before a system call does not interrupt that call."""
        deadline = time.monotonic() + _DEAF_S
        while not self._heard.is_set():
            if time.monotonic() >= deadline:
                self._end()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            self._heard.wait(min(_AGAIN_S, _DEAF_S))

    def _interrupt(self, number: int, frame: object) -> None:
        if not self._heard.is_set():
            self._heard.set()
            raise KeyboardInterrupt

    def _end(self) -> None:
        """Terminate this process. A local cluster's guard cleans up afterwards, as after a
        SIGKILL."""
        text = (
            f"hybridflow: {self._lost}; the driver was waiting for it in a call that cannot be "
            "interrupted, and was terminated"
        )
        with suppress(OSError):  # a full disk or a closed pipe must not keep it alive
            print(
                f"{text}; the same command resumes from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    def _wait(self, kept: Sequence[int]) -> None:
        """Wait until the next poll is due, a process exits (reported once), or `stop` is called."""
        fresh = [pid for pid in (*self._watched.pids(), *kept) if pid not in self._noticed]
        if all(map(is_running, fresh)):  # otherwise one exited since the last poll
            with _ends_of(fresh) as ends:
                poll = select.poll()
                for descriptor in (self._stop, *ends):
                    poll.register(descriptor, select.POLLIN)
                poll.poll(_POLL_S * 1000)
        self._noticed.update(pid for pid in fresh if not is_running(pid))


@contextmanager
def _ends_of(pids: Sequence[int]) -> Iterator[list[int]]:
    """Context manager that yields file descriptors, which become readable when the processes
    exit.
    """
    descriptors: list[int] = []
    try:
        for pid in pids:
            with suppress(OSError):  # already exited, or out of descriptors: the next poll is soon
                descriptors.append(os.pidfd_open(pid))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Guard:
    """The process that cleans up a local cluster after this process was killed (`guard`).

    Args:
        temp_dir: the cluster's private folder.
    """

    def __init__(self, temp_dir: Path) -> None:
        self._temp_dir = temp_dir
        self.process = self._start()

    def keep(self) -> list[int]:
        """Restart the guard if it has exited, for example if it was killed. Returns its pid."""
        if self.process.poll() is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process = self._start()
        return [self.process.pid]

    def stop(self) -> None:
        """Stop the guard, which then cleans up nothing."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"x")
            self.process.stdin.close()
            self.process.wait(timeout=5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        script = guard.__file__
        command = [sys.executable, "-I", "-S", script, str(self._temp_dir), str(os.getpid())]
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


class Watched(Protocol):
    """A component whose loss is detected by `Watch`."""

    def pids(self) -> Sequence[int]:
        """Return the processes whose exit triggers a poll immediately."""

    def ended(self) -> str:
        """Return a description of a component that has exited, or an empty string if there is
        none.
        """

    def silent(self) -> str:
        """Return a description of a component that has not responded for some time, or an empty
        string if there is none. Called once per poll.
        """


class Processes:
    """Named processes on this machine."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._stopped = dict.fromkeys(pids, 0)

    def pids(self) -> Sequence[int]:
        """Return all process ids."""
        return list(self._pids.values())

    def ended(self) -> str:
        """Describe the first process that has exited."""
        for name, pid in self._pids.items():
            if state_of(pid) in ("", "Z"):
                return f"Ray's {name} (process {pid}) has ended"
        return ""

    def silent(self) -> str:
        """Describe the first process that has been stopped for some time."""
        for name, pid in self._pids.items():
            self._stopped[name] = self._stopped[name] + 1 if state_of(pid) == STOPPED else 0
            if self._stopped[name] >= _STOPPED_LOOKS:
                return f"Ray's {name} (process {pid}) is stopped (SIGSTOP)"
        return ""


class Starting:
    """Processes that are starting up. A process that has been seen running must not exit.

    Args:
        running: returns the current processes, keyed by name. Processes that exist at construction
            belong to an earlier cluster and are ignored.
        timeout_s: maximum duration of start-up, counted from construction.
    """

    def __init__(self, running: Callable[[], Mapping[str, int]], timeout_s: float) -> None:
        self._running = running
        self._seen = dict[str, int]()
        self._before = frozenset(running().values())
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def pids(self) -> Sequence[int]:
        """Return the processes seen so far."""
        return list(self._seen.values())

    def ended(self) -> str:
        """Describe the first process that has exited."""
        for name, pid in self._running().items():
            if pid not in self._before:
                self._seen[name] = pid
        return Processes(self._seen).ended()

    def silent(self) -> str:
        """Return a description if start-up has exceeded its timeout."""
        if time.monotonic() < self._deadline:
            return ""
        return f"Ray did not respond within cluster.start_timeout_s={self._timeout_s:g}"


class Address:
    """The gcs of a joined cluster, at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._failures = 0

    def pids(self) -> Sequence[int]:
        """Return no process ids, because the gcs is on another machine."""
        return ()

    def ended(self) -> str:
        """Return an empty string, because a single failed connection is not conclusive."""
        return ""

    def silent(self) -> str:
        """Return a description if the gcs has refused several connections in a row."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            self._failures = 0
        except OSError as error:
            self._failures += 1
            if self._failures >= _FAILED_LOOKS:
                return f"Ray's gcs at {self._address} does not accept connections: {error}"
        return ""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
