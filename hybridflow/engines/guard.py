"""A process between the trainer and one SGLang server: no process of the server outlives either of
them.

Run as a plain script: `python guard.py PARENT_PID GRACE_S FOLDER -- COMMAND...`; standard library
only, about 10 MB and 30 ms. In a fork of a process that has loaded SGLang (`process.fork_server`)
COMMAND is `-m MODULE ...`, which it runs in a fork of its own. The server starts once FOLDER is
there, which the parent makes when the guard runs: a parent that is killed at any moment leaves
nothing behind.

Why not PR_SET_PDEATHSIG on the server alone: that signal fires when the parent *thread* ends, so an
engine started from a pool thread would die with it; and SGLang's children arm their own only after
start-up (sglang/srt/managers/scheduler.py:6269), so a parent killed during a start would leave them
behind. The guard watches the parent's pid, and ends the server's whole session by pid.
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
LOOK_POLLS = 20  # look at the processes of the server every so many polls
# a process that was stopped (SIGSTOP) in so many looks is not waited for any longer
STOPPED_LOOKS = 5
SHARED_MEMORY_PREFIX = "/dev/shm/"
DELETED = " (deleted)"  # what /proc/PID/maps adds to the path of a file that has lost that name
NOTE = "shared-memory"
UNFINISHED = ".new"  # added to the name of a folder that the parent has not filled yet
PR_SET_PDEATHSIG = 1


def session_members(session: int) -> list[int]:
    """Pids of the live processes of a session, without its leader. Zombies do not count."""
    return list(states_of_members(session))


def states_of_members(session: int) -> dict[int, str]:
    """The live processes of a session with their states as in /proc, without its leader."""
    members = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == session:
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # after the command name: state, ppid, pgrp, session, ...
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it ended between listing and reading
        if int(fields[3]) == session and fields[0] not in "ZX":
            members[int(entry)] = fields[0]
    return members


def kill_session(session: int, timeout_s: float = 5.0) -> list[int]:
    """SIGKILL everything in the session but its leader, until nothing is left. Returns what is
    still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := session_members(session)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def shared_memory_of(pids: list[int]) -> set[str]:
    """Shared-memory files mapped by these processes, named semaphores among them.

    SGLang leaves its load snapshot behind even on a graceful stop
    (sglang/srt/managers/load_snapshot.py:303), killed processes leave more.
    """
    mapped = {one for pid in pids for one in _mapped_by(pid)}
    found = {path for path, _ in mapped if not path.endswith(DELETED)}
    # sem_open maps a file and then gives it the semaphore's name: maps shows its first name, which
    # is deleted
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
    """The process's files in shared memory, as its maps show their paths, with their inodes."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            lines = [line.rstrip("\n").split(None, 5) for line in maps]
    except OSError:
        return set()  # it has ended
    return {
        (line[5], int(line[4]))
        for line in lines
        if len(line) == 6 and line[5].startswith(SHARED_MEMORY_PREFIX)
    }


def note_shared_memory(folder: str, paths: set[str]) -> None:
    """Add the paths to the note in the engine's folder, for `noted_shared_memory`."""
    if paths:
        # added, not replaced: guard and parent both write
        with suppress(OSError), open(os.path.join(folder, NOTE), "a", encoding="utf-8") as note:
            note.write("".join(f"{path}\n" for path in sorted(paths)))


def noted_shared_memory(folder: str) -> set[str]:
    """What was noted by the guard, which may have been killed, or by its parent when the server was
    ready."""
    try:
        with open(os.path.join(folder, NOTE), encoding="utf-8") as note:
            return {
                path for path in note.read().splitlines() if path.startswith(SHARED_MEMORY_PREFIX)
            }
    except OSError:
        return set()


def remove_shared_memory(paths: set[str]) -> None:
    """Unlink what `shared_memory_of` found."""
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


def is_ours(folder: str) -> bool:
    """Whether the folder is there and this user's: others can read its name in our command line
    before it is made."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def remove(folder: str) -> None:
    """Remove the folder of a server, also one that is not filled yet."""
    for path in (folder, folder + UNFINISHED):
        shutil.rmtree(path, ignore_errors=True)


def die_with_guard(guard: int) -> None:
    """What the server does first: if the guard with this pid is killed, also before this, so is the
    server. The guard has one thread, so the signal comes with its end and not before."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os.kill(os.getpid(), signal.SIGKILL)


class Fork:
    """A fork of this process, with the part of `subprocess.Popen` that `main` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float = 60.0) -> int:
        """The exit status, once it has ended."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the server", timeout)
            time.sleep(0.02)
        return status


def start(command: list[str]) -> subprocess.Popen[bytes] | Fork | None:
    """Start the server; None in the fork that is to become it."""
    guard = os.getpid()
    if command[0] != "-m":
        # one thread here
        return subprocess.Popen(command, preexec_fn=lambda: die_with_guard(guard))  # noqa: PLW1509
    if pid := os.fork():
        return Fork(pid)
    die_with_guard(guard)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return None


def process_end(pid: int) -> select.poll | None:
    """What `poll(0)` of tells whether the process has ended; None when it has already."""
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
        print(f"guard: the server did not stop within {grace_s:.0f} s", flush=True)


def main(argv: list[str]) -> int:
    """Run the command until it ends, the parent ends, or SIGTERM arrives. Returns the command's
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
    # a fork server starts us with it blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    is_fork = command[0] == "-m"  # then its parent is the fork server
    orphaned = process_end(parent) if is_fork or os.getppid() == parent else None
    while not is_ours(folder):
        if asked or orphaned is None or orphaned.poll(0):
            remove(folder)
            return 128 + signal.SIGTERM
        time.sleep(POLL_S / 10)
    server = start(command)
    if server is None:
        from hybridflow.process.fork_server import run

        run(command)
        return 0
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
        # known early, and noted for our parent: a server that crashes takes its maps with it, and
        # we may be killed a server makes some while it starts, some later
        if found := shared_memory_of(list(members)) - leftovers:
            leftovers |= found
            note_shared_memory(folder, found)
        stopped = {pid: stopped.get(pid, 0) + 1 for pid, state in members.items() if state == "T"}
        # the rest would wait for it until their deadlines
        if max(stopped.values(), default=0) >= STOPPED_LOOKS:
            print(
                f"guard: processes {sorted(stopped)} were stopped and stand still: the engine ends",
                flush=True,
            )
            grace_s = 0.0
            break
    # The maps of a server that crashed before our first look are gone. Our parent has noted them
    # when it was ready.
    leftovers |= shared_memory_of(session_members(session)) | noted_shared_memory(folder)
    if server.poll() is None and grace_s > 0:
        _terminate(server, grace_s)
    left = kill_session(session)
    if left:
        print(f"guard: could not end processes {left}", flush=True)
    status = server.wait()
    remove_shared_memory(leftovers)
    remove(folder)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
