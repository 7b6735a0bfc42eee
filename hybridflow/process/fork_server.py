"""A server that preloads modules and forks the processes that need them. A new interpreter needs
several core-seconds to import each of torch, Megatron and SGLang; a fork takes milliseconds.

`python -m hybridflow.process.fork_server SOCKET MODULE... [/ SOCKET MODULE...]...` loads the
modules. SOCKET is the descriptor of a listening socket. For each connection to it by the same user
(`fork_client.fork`), the server forks a process. Each `/` begins another server, which is itself
forked from the first. Use it only on machines without CUDA, because CUDA contexts do not survive a
fork. For the same reason, requests are rejected if a module has started threads. When the server
exits, its forks are killed, except those that lead a separate session.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybridflow.process.children import die_with_parent, use_threads_of_environment
from hybridflow.process.fork_client import peer_user
from hybridflow.process.importing import without_collection

_ORDER_TIMEOUT_S = 10.0
_MAX_ORDER_BYTES = 4 << 20


@dataclass
class _Child:
    """A running fork: its client's connection, and a descriptor that becomes readable when it
    exits."""

    pid: int
    connection: socket.socket
    ended: int
    is_over: bool = False


def main(argv: Sequence[str]) -> None:
    """Run the servers given on the command line and, in a fork, the requested program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    _name(["-m", "hybridflow.process.fork_server", *argv])
    groups: list[list[str]] = [[]]
    for word in argv:
        if word == "/":
            groups.append([])
        else:
            groups[-1].append(word)
    listeners = [socket.socket(fileno=int(group[0])) for group in groups]
    _load(groups[0][1:])
    chosen = 0
    first = os.getpid()
    for number in range(1, len(groups)):
        if not os.fork():
            die_with_parent(first)
            _load(groups[number][1:])
            chosen = number
            break
    for number, listener in enumerate(listeners):
        if number != chosen:
            listener.close()
    run(_serve(listeners[chosen])["argv"])


def _name(words: Sequence[str]) -> None:
    """Set this process's title to `python WORDS...`. Uses setproctitle, as SGLang does. That
    library must be called once before the environment changes.
    """
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(" ".join(["python", *words]))


def _load(modules: Sequence[str]) -> None:
    with without_collection(), warnings.catch_warnings():
        # libraries warn about missing devices; this process writes to the user's terminal
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)
        # forks share the loaded objects: a collection in a fork neither visits nor copies them
        gc.freeze()


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Handle requests. Returns only in a fork, with the request to execute."""
    with listener, selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                child: _Child | None = key.data
                if child is None:
                    if (order := _accept(listener, events)) is not None:
                        return order
                elif child.is_over:
                    continue
                elif key.fileobj == child.ended:
                    _report_end(child, events)
                else:  # the client has closed the connection
                    events.unregister(child.connection)
                    os.kill(child.pid, signal.SIGTERM)


def _accept(listener: socket.socket, events: selectors.BaseSelector) -> dict[str, Any] | None:
    """Fork for the next client. Returns the request in the fork, and None in the server."""
    connection, _ = listener.accept()
    # silently: otherwise any user could flood this user's terminal
    if peer_user(connection) != os.getuid():
        connection.close()
        return None
    connection.settimeout(_ORDER_TIMEOUT_S)
    files: list[int] = []
    server = os.getpid()
    try:
        order = _read(connection, files)
        # its client may exit immediately; SIGTERM must not arrive before a process that cleans up
        # after itself has installed its handler
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if order["leader"] else ())
        pid = os.fork()
        if not pid:
            try:
                _begin(order, files, server)
            except OSError as error:
                # the working directory no longer exists: exit, and do not continue as a second
                # server
                sys.exit(f"could not start {' '.join(order['argv'])}: {error}")
            # otherwise clients would not notice that the server has exited
            for key in list(events.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)
            connection.close()
            return order
    except (OSError, ValueError) as error:
        # a full disk or a closed pipe must not end the server; print would keep unwritten text
        with suppress(OSError):
            os.write(2, f"fork server: rejected a request: {error}\n".encode())
        connection.close()
        return None
    finally:
        if os.getpid() == server:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for file in files:
            os.close(file)
    child = _Child(pid, connection, os.pidfd_open(pid))
    _answer(connection, {"pid": pid})
    events.register(child.ended, selectors.EVENT_READ, child)
    events.register(connection, selectors.EVENT_READ, child)
    return None


def _read(connection: socket.socket, files: list[int]) -> dict[str, Any]:
    """Read a request and append its file descriptors to `files`. Raises ValueError if the request
    cannot be executed."""
    _, received, _, _ = socket.recv_fds(connection, 1, 3)
    files += received
    text = bytearray()
    while not text.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part or len(text) > _MAX_ORDER_BYTES:
            raise ValueError("the request is incomplete or too long")
        text += part
    if len(files) != 3:
        raise ValueError(f"expected 3 file descriptors, got {len(files)}")
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise ValueError(
            f"the server has {threads} threads: a fork keeps only the calling "
            "thread, while locks held by the others stay locked"
        )
    order: dict[str, Any] = json.loads(text)
    return order


def _answer(connection: socket.socket, message: dict[str, int]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return  # the client has exited; its closed connection is detected separately


def _report_end(child: _Child, events: selectors.BaseSelector) -> None:
    child.is_over = True
    _, status = os.waitpid(child.pid, 0)
    _answer(child.connection, {"status": os.waitstatus_to_exitcode(status)})
    events.unregister(child.ended)
    if child.connection in events.get_map():
        events.unregister(child.connection)
    os.close(child.ended)
    child.connection.close()


def _begin(order: dict[str, Any], files: Sequence[int], server: int) -> None:
    """Make this fork equivalent to a new interpreter, with separate files, environment, working
    directory, random states and number of threads."""
    if order["leader"]:
        os.setsid()
    else:
        os.setpgid(0, 0)  # Ray kills the process group of a worker that it ends
        die_with_parent(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(order["cwd"])
    _name(order["argv"])
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # TMPDIR may differ
    # Python reseeds its own generators after a fork; these two keep a random seed that all forks
    # would share
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    use_threads_of_environment()


def run(argv: Sequence[str]) -> None:
    """Run `python -P ARGV...` in this interpreter: a script, or -m and a module, with its
    arguments."""
    if argv[0] == "-m":
        sys.argv = [argv[1], *argv[2:]]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
