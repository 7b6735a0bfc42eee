"""Asking a fork server (`fork_server`) for a process, and being that process for whoever started
us.

Standard library only. Run as a script, `python -I -S fork_client.py SOCKET ARGUMENT...` is `python
-P ARGUMENT...` that finds its modules loaded: it passes environment, folder and files on, forwards
SIGTERM and SIGINT, and ends as the process ends. Where the server does not answer, it becomes that
interpreter itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

PATIENCE_S = 120.0  # for a server to load its modules
_POLL_S = 0.02


def address_of(name: str) -> str:
    """The abstract unix address of the server with this name: nothing on the disk, gone with the
    server."""
    return f"\0hybridflow-fork-{name}"


def peer_user(connection: socket.socket) -> int:
    """The user number of the process at the other end of a unix socket: of who has connected, or of
    who listens."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1])


class ForkedProcess:
    """A process that a fork server started for us, with the part of `subprocess.Popen` that its
    users need.

    When this end of the connection is closed, or this process ends, the other is sent SIGTERM.
    """

    def __init__(self, connection: socket.socket, pid: int, answers: IO[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._answers = answers

    def poll(self) -> int | None:
        """The exit code, None while it runs. The end of the server counts as the end of the process
        (SIGKILL)."""
        if self.returncode is None:
            self._connection.settimeout(0.0)
            try:
                self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                pass  # the connection was reset: it has ended
            self._connection.settimeout(PATIENCE_S)
            # also when the connection has ended: the status of a short process may have come with
            # its pid
            line = self._answers.readline()
            self.returncode = int(json.loads(line)["status"]) if line else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended; subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def close(self) -> None:
        """Close the connection: it is sent SIGTERM."""
        self._answers.close()
        self._connection.close()

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def fork(
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    files: Sequence[int],
    *,
    leader: bool = False,
) -> ForkedProcess:
    """Have the server run `python -P ARGV...` (a script, or -m and a module) in a fork of itself.

    Args:
        name: of the server.
        argv: the script or `-m MODULE`, and its arguments.
        env: the whole environment.
        files: descriptors of its standard input, output and error.
        leader: it leads a session of its own and looks after its own end: it begins with SIGTERM
            blocked, to unblock it once it can handle it. Otherwise it is killed when the server
            ends.

    Raises:
        OSError: there is no such server, it has ended, or another user listens under its name;
            nothing was sent then.
    """
    order = {"argv": list(argv), "env": dict(env), "cwd": os.getcwd(), "leader": leader}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE_S)
        connection.connect(address_of(name))
        # anybody may take the name of a server that has ended
        if (user := peer_user(connection)) != os.getuid():
            raise ConnectionRefusedError(
                f"the user with the number {user} listens as the fork server {name}"
            )
        socket.send_fds(connection, [b"\n"], list(files))
        connection.sendall(json.dumps(order).encode() + b"\n")
        answers = connection.makefile("r")
        line = answers.readline()
        if not line:
            raise ConnectionResetError(f"the fork server {name} has ended")
        return ForkedProcess(connection, int(json.loads(line)["pid"]), answers)
    except BaseException:
        connection.close()
        raise


def main(argv: Sequence[str]) -> int:
    """Be the process that the words ask for, as the module says; returns its exit status."""
    try:
        process = fork(argv[0], argv[1:], os.environ, (0, 1, 2))
    except OSError:
        os.execv(sys.executable, [sys.executable, "-P", *argv[1:]])

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    status = process.wait()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
