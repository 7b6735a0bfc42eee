"""A guard process between the trainer and one SGLang server. It ensures that no process of the
server outlives the trainer or the guard.

Run as a plain script: `python guard.py PARENT_PID GRACE_S FOLDER -- COMMAND...`. It uses only the
standard library, so it needs about 10 MB and starts in 30 ms. If the guard is itself a fork of a
process that has loaded SGLang (`process.fork_server`), COMMAND is `-m MODULE ...`, which runs in a
further fork. The server starts only once FOLDER exists, which the parent creates after the guard
has started. A parent killed at any moment therefore leaves nothing behind.

PR_SET_PDEATHSIG on the server is not enough: that signal fires when the parent *thread* exits, so
an engine started from a pool thread would die with it. SGLang's child processes set it themselves,
but only after start-up (sglang/srt/managers/scheduler.py:6269), so they would survive a parent
killed during start-up. The guard therefore watches the parent's pid, and kills the server's whole
session by pid.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

POLL_S = 0.1
LOOK_POLLS = 20  # polls between scans of the server's processes
# a process found stopped (SIGSTOP) in this many scans counts as hung
STOPPED_LOOKS = 5
SHARED_MEMORY_PREFIX = "/dev/shm/"
DELETED = " (deleted)"  # suffix in /proc/PID/maps of an unlinked file
NOTE = "shared-memory"
UNFINISHED = ".new"  # suffix of a folder that the parent is still filling
PR_SET_PDEATHSIG = 1


def session_members(session: int) -> list[int]:
    """Return the pids of a session's live processes, excluding the leader and zombies."""
    return list(states_of_members(session))


def states_of_members(session: int) -> dict[int, str]:
    """Return {pid: state letter from /proc} for a session's live processes, excluding the
    leader.
    """
    members = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == session:
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # after the command name: state, ppid, pgrp, session, ...
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it exited in the meantime
        if int(fields[3]) == session and fields[0] not in "ZX":
            members[int(entry)] = fields[0]
    return members


def kill_session(session: int, timeout_s: float = 5.0) -> list[int]:
    """Kill all processes of the session except its leader, repeating SIGKILL until none remains.
    Returns the pids that remain after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := session_members(session)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def shared_memory_of(pids: list[int]) -> set[str]:
    """Return the shared-memory files mapped by these processes, including named semaphores.

    SGLang does not remove its load snapshot even on a graceful stop
    (sglang/srt/managers/load_snapshot.py:303), and killed processes leave further files behind.
    """
    mapped = {one for pid in pids for one in _mapped_by(pid)}
    found = {path for path, _ in mapped if not path.endswith(DELETED)}
    # sem_open maps a file before renaming it to the semaphore's name, so maps shows the first name
    # as deleted
    deleted = {inode for path, inode in mapped if path.endswith(DELETED)}
    if deleted:
        with os.scandir(SHARED_MEMORY_PREFIX) as entries:
            found |= {
                entry.path
                for entry in entries
                if entry.name.startswith("sem.") and entry.inode() in deleted
            }
    return found


def _mapped_by(pid: int) -> set[tuple[str, int]]:
    """Return (path, inode) of each shared-memory file that the process maps."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            lines = [line.rstrip("\n").split(None, 5) for line in maps]
    except OSError:
        return set()  # it has exited
    return {
        (line[5], int(line[4]))
        for line in lines
        if len(line) == 6 and line[5].startswith(SHARED_MEMORY_PREFIX)
    }


def note_shared_memory(folder: str, paths: set[str]) -> None:
    """Append the paths to a file in the engine's folder, from which `noted_shared_memory` reads
    them.
    """
    if paths:
        # append, because both guard and parent write
        with suppress(OSError), open(os.path.join(folder, NOTE), "a", encoding="utf-8") as note:
            note.write("".join(f"{path}\n" for path in sorted(paths)))


def noted_shared_memory(folder: str) -> set[str]:
    """Return the shared-memory paths recorded by the guard, and by its parent when the server
    became ready. Used if the guard itself has been killed.
    """
    try:
        with open(os.path.join(folder, NOTE), encoding="utf-8") as note:
            return {
                path for path in note.read().splitlines() if path.startswith(SHARED_MEMORY_PREFIX)
            }
    except OSError:
        return set()


def remove_shared_memory(paths: set[str]) -> None:
    """Unlink files found by `shared_memory_of`."""
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


def is_ours(folder: str) -> bool:
    """Return True if the folder exists and belongs to this user. Another user could read the
    folder's name on the guard's command line and create the folder first.
    """
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def remove(folder: str) -> None:
    """Remove a server's folder, including one that was only partly written."""
    for path in (folder, folder + UNFINISHED):
        shutil.rmtree(path, ignore_errors=True)


def die_with_guard(guard: int) -> None:
    """Make the kernel kill this process (the server) when the guard with this pid exits. If the
    guard has already exited, this process is killed immediately. Must be the first call in the
    process. Because the guard has a single thread, the signal arrives exactly when the guard exits.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os.kill(os.getpid(), signal.SIGKILL)


class Fork:
    """A fork of this process. Implements the part of the `subprocess.Popen` interface that `main`
    uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM unless the process has exited."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the process to exit and return its status."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the server", timeout)
            time.sleep(0.02)
        return status


def start(command: list[str]) -> subprocess.Popen[bytes] | Fork | None:
    """Start the server. Returns None in the fork that becomes the server."""
    guard = os.getpid()
    if command[0] != "-m":
        # this process has one thread
        return subprocess.Popen(command, preexec_fn=lambda: die_with_guard(guard))  # noqa: PLW1509
    if pid := os.fork():
        return Fork(pid)
    die_with_guard(guard)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return None


def _become(command: list[str]) -> None:
    """Run the server in this fork. Exits without the interpreter's normal shutdown, which may wait
    forever for the threads and queues of a server that failed during start-up."""
    import traceback

    from hybridflow.process.fork_server import run

    status = 1
    try:
        run(command)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)


def process_end(pid: int) -> select.poll | None:
    """Return a poll object that becomes ready when the process exits; None if it has already
    exited.
    """
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
    except ProcessLookupError:
        return None
    return ended


def _terminate(server: subprocess.Popen[bytes] | Fork, grace_s: float) -> None:
    server.terminate()
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        print(f"guard: the server did not stop within {grace_s:.0f} s of SIGTERM", flush=True)


def main(argv: list[str]) -> int:
    """Run the command until it exits, the parent exits, or SIGTERM arrives. Returns the command's
    exit status."""
    parent = int(argv[0])
    grace_s = float(argv[1])
    folder = argv[2]
    command = argv[4:]
    asked: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the fork server starts us with SIGTERM blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    is_fork = command[0] == "-m"  # then the parent process is the fork server
    orphaned = process_end(parent) if is_fork or os.getppid() == parent else None
    while not is_ours(folder):
        if asked or orphaned is None or orphaned.poll(0):
            remove(folder)
            return 128 + signal.SIGTERM
        time.sleep(POLL_S / 10)
    server = start(command)
    if server is None:
        _become(command)
        return 1  # never reached
    session = os.getpid()
    leftovers = set[str]()
    polls = 0
    stopped = dict[int, int]()
    while server.poll() is None and not asked and orphaned is not None and not orphaned.poll(0):
        time.sleep(POLL_S)
        polls += 1
        if polls % LOOK_POLLS:
            continue
        members = states_of_members(session)
        # Record them early for our parent, because a crashed server's maps are gone and this guard
        # may be killed. Some files are created during start-up, some later.
        if found := shared_memory_of(list(members)) - leftovers:
            leftovers |= found
            note_shared_memory(folder, found)
        stopped = {pid: stopped.get(pid, 0) + 1 for pid, state in members.items() if state == "T"}
        # the other processes would wait for a stopped one until their deadlines
        if max(stopped.values(), default=0) >= STOPPED_LOOKS:
            print(
                f"guard: processes {sorted(stopped)} are stopped (SIGSTOP); killing the engine",
                flush=True,
            )
            grace_s = 0.0
            break
    # If the server crashed before our first scan, its maps are gone, but our parent recorded the
    # files when the server became ready.
    leftovers |= shared_memory_of(session_members(session)) | noted_shared_memory(folder)
    if server.poll() is None and grace_s > 0:
        _terminate(server, grace_s)
    left = kill_session(session)
    if left:
        print(f"guard: could not kill processes {left}", flush=True)
    status = server.wait()
    remove_shared_memory(leftovers)
    remove(folder)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
