"""Exchange of JSON lines over a socket, and functions that start processes connected by a socket.
Types that JSON lacks but parquet columns may contain, such as bytes and dates, are preserved.
"""

from __future__ import annotations

import base64
import datetime
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hybridflow.process.children import die_with_parent, print_whole_lines
from hybridflow.process.secret import without_credentials
from hybridflow.process.surroundings import import_path

_KIND = "__hybridflow__"
_POLL_S = 0.01


class Lines:
    """One end of a connection. Its operations block unless the socket is set to non-blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._in = bytearray()
        self._out = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message without queueing it. Requires a blocking socket."""
        self.socket.sendall(encoded(message))

    def queue(self, message: dict[str, Any]) -> None:
        """Queue a message for the next `flush`."""
        self._out += encoded(message)

    def flush(self) -> bool:
        """Send as much as possible without blocking. Returns True if unsent data remains."""
        while self._out:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                break
            except OSError:  # the peer has closed; reading reports that too
                self._out.clear()
                break
            del self._out[:sent]
        return bool(self._out)

    def received(self) -> list[dict[str, Any]] | None:
        """Read once and return all messages that are now complete; None if the peer has closed the
        connection."""
        try:
            part = self.socket.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionError:
            return None
        if not part:
            return None
        self._in += part
        whole, newline, rest = self._in.rpartition(b"\n")
        if not newline:
            return []
        self._in = bytearray(rest)
        return [decoded(line) for line in whole.split(b"\n")]

    def first(self) -> dict[str, Any] | None:
        """Wait for the first message and return it, or None if the peer has closed the connection.
        Requires a blocking socket."""
        while (messages := self.received()) == []:
            continue
        return messages[0] if messages else None


def start_process(module: str, log_path: Path | None) -> tuple[subprocess.Popen[bytes], Lines]:
    """Start `python -m module DESCRIPTOR`, connected to this process but without the job's
    credentials. Returns the process and this end of the connection.

    Its output goes to `log_path` or, if that is None, to this process's output.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as opened:
        out = None
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            out = opened.enter_context(log_path.open("ab"))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(opened.enter_context(theirs).fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=without_credentials() | {"PYTHONPATH": os.pathsep.join(import_path())},
        )
    return process, Lines(ours)


class Forked:
    """A forked process that implements the used subset of the `subprocess.Popen` interface."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is still running."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # not our child: this process is a fork of its parent
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL unless the process has exited."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait for the process and return its exit code. Raises TimeoutError after `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not exit within {timeout:g} s")
            time.sleep(_POLL_S)
        return code


def fork_process(
    main: Callable[[Sequence[str]], None], log_path: Path | None
) -> tuple[Forked, Lines]:
    """Run `main([DESCRIPTOR])` in a fork of this process. Differs from `start_process` in that the
    child inherits this process's objects. All other open files are closed in the child.
    """
    ours, theirs = socket.socketpair()
    driver = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Forked(pid), Lines(ours)
    code = 1
    try:
        die_with_parent(driver)
        # collecting an inherited object could close a descriptor number that has been reused
        gc.freeze()
        _keep_only(theirs.fileno(), log_path)
        kept = without_credentials()
        os.environ.clear()
        os.environ.update(kept)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        main([str(theirs.fileno())])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _keep_only(descriptor: int, log_path: Path | None) -> None:
    """Close all descriptors except the given one and the standard streams, and redirect output to
    `log_path`."""
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)


def connection_of(argv: Sequence[str]) -> Lines:
    """Open the connection in a process started by `start_process`. Ctrl-C is ignored, because the
    driver handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print_whole_lines()
    return Lines(socket.socket(fileno=int(argv[0])))


def encoded(message: dict[str, Any]) -> bytes:
    """Encode a message as a line. Raises a ValueError that names the type of any value that is not
    plain data."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def decoded(line: bytes | bytearray) -> dict[str, Any]:
    """Decode a line that was encoded by `encoded`."""
    message: dict[str, Any] = json.loads(line, object_hook=_restored)
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_KIND: "bytes", "text": base64.b64encode(value).decode()}
    if isinstance(value, datetime.date):  # includes datetime, a subclass
        return {_KIND: type(value).__name__, "text": value.isoformat()}
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    raise ValueError(f"a value of type {type(value).__name__}")


def _restored(value: dict[str, Any]) -> Any:
    kind = value.get(_KIND)
    if kind == "bytes":
        return base64.b64decode(value["text"])
    if kind in ("date", "datetime"):
        return getattr(datetime, kind).fromisoformat(value["text"])
    return value
