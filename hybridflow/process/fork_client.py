"""The client of a fork server (`fork_server`). It requests a forked process and represents that
process to the caller. Uses only the standard library. As a script, `python -I -S fork_client.py
SOCKET ARGUMENT...` behaves like `python -P ARGUMENT...` with the modules already loaded. It passes
its environment, working directory and standard streams to the fork, forwards SIGTERM and SIGINT,
and exits with the fork's status. If the server does not respond, it replaces itself with a regular
interpreter.
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
    """Return the abstract Unix socket address of the server with this name. An abstract address has
    no file and disappears when the server exits.
    """
    return f"\0hybridflow-fork-{name}"


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket. Works for both the
    connecting and the listening process.
    """
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1])


class ForkedProcess:
    """Handle of a process started by a fork server, with a subset of the methods of
    `subprocess.Popen`. The forked process receives SIGTERM when this end of the connection is
    closed, including when this process exits.
    """

    def __init__(self, connection: socket.socket, pid: int, answers: IO[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._answers = answers

    def poll(self) -> int | None:
        """Return the exit code, or None while the process is running. If the server exits, the
        process is reported as killed by SIGKILL."""
        if self.returncode is None:
            self._connection.settimeout(0.0)
            try:
                self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                pass  # the connection was reset: the process has exited
            self._connection.settimeout(PATIENCE_S)
            # check even after the connection has closed: the status of a short-lived process may
            # arrive together with its pid
            line = self._answers.readline()
            self.returncode = int(json.loads(line)["status"]) if line else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code. Raises subprocess.TimeoutExpired after
        `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has exited."""
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def close(self) -> None:
        """Close the connection. The process then receives SIGTERM."""
        self._answers.close()
        self._connection.close()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def fork(
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    files: Sequence[int],
    *,
    leader: bool = False,
) -> ForkedProcess:
    """Request that the server run `python -P ARGV...` (a script, or -m and a module) in a fork.

    Args:
        name: the server's name.
        argv: the script or `-m MODULE`, and its arguments.
        env: the complete environment.
        files: descriptors for the process's standard input, output and error.
        leader: True for a process that leads a separate session and handles its own shutdown. It
            starts with SIGTERM blocked, and must unblock the signal once its handler is installed.
            If False, the process is killed when the server exits.

    Raises:
        OSError: the server does not exist, has exited, or belongs to another user; nothing was
            sent.
    """
    order = {"argv": list(argv), "env": dict(env), "cwd": os.getcwd(), "leader": leader}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE_S)
        connection.connect(address_of(name))
        # any user can take the name of a server that has exited
        if (user := peer_user(connection)) != os.getuid():
            raise ConnectionRefusedError(f"user {user} owns the socket of fork server {name}")
        socket.send_fds(connection, [b"\n"], list(files))
        connection.sendall(json.dumps(order).encode() + b"\n")
        answers = connection.makefile("r")
        line = answers.readline()
        if not line:
            raise ConnectionResetError(f"the fork server {name} has exited")
        return ForkedProcess(connection, int(json.loads(line)["pid"]), answers)
    except BaseException:
        connection.close()
        raise


def main(argv: Sequence[str]) -> int:
    """Run the process described by the arguments (see the module's docstring) and return its exit
    status."""
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
