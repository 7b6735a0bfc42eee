"""Runs in one process that are forked from a process which has loaded what all of them import.

A new interpreter takes 7 seconds of a core to import torch, Megatron and transformers. The first
run of tests/e2e/test_in_process.py starts an interpreter of its own, as a user does.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from tests.e2e.runs import Run

# Reads a line for each run and forks it: [words, environment, folder or null]; the descriptors of
# stdout and stderr come with it. Answers its pid, and later its pid and exit status.
SERVER = """
import array, json, os, select, signal, socket, sys
import hybridflow.engines.hf.engine, hybridflow.mcore.backend, hybridflow.trainer.app
import transformers
from hybridflow.cli.main import main

orders = socket.socket(fileno=int(sys.argv[1]))
children = {}  # a descriptor of each: its pid


def run(words, env, cwd, files):
    os.setsid()
    orders.close()
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, number)
        os.close(file)
    for file in children:
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    if cwd:
        os.chdir(cwd)
    code = main(words)
    assert not sys.modules.keys() & {"ray", "sglang"}
    sys.exit(code)


signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    for ready in select.select([orders, *children], [], [])[0]:
        if ready is not orders:
            pid = children.pop(ready)
            os.close(ready)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            orders.send(json.dumps([pid, status]).encode())
            continue
        text, files, _, _ = socket.recv_fds(orders, 1 << 20, 2)
        if not text:
            sys.exit(0)
        pid = os.fork()
        if not pid:
            run(*json.loads(text), files)
        for file in files:
            os.close(file)
        children[os.pidfd_open(pid)] = pid
        orders.send(json.dumps([pid]).encode())
"""
START_S = 240.0


class Server:
    """The process that forks, and the exit statuses of its forks."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._statuses: dict[int, int] = {}
        atexit.register(self.close)

    def fork(
        self, words: Sequence[str], env: Mapping[str, str], cwd: Path | None, *files: BinaryIO
    ) -> int:
        """The pid of a new run of `hybridflow WORDS`."""
        order = json.dumps([list(words), dict(env), None if cwd is None else str(cwd)]).encode()
        socket.send_fds(self._orders, [order], [file.fileno() for file in files])
        while True:
            answer = self._answer(START_S)
            assert answer is not None, f"no run was forked within {START_S:g} s"
            if len(answer) == 1:
                return answer[0]
            self._statuses[answer[0]] = answer[1]

    def status(self, pid: int, timeout_s: float) -> int | None:
        """The exit status of a fork, None where it runs for longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._statuses:
            answer = self._answer(max(0.0, deadline - time.monotonic()))
            if answer is None:
                return None
            self._statuses[answer[0]] = answer[1]
        return self._statuses[pid]

    def _answer(self, timeout_s: float) -> list[int] | None:
        if not select.select([self._orders], [], [], timeout_s)[0]:
            return None
        answer = self._orders.recv(1 << 12)
        assert answer, "the process that forks the runs has ended"
        found: list[int] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the process."""
        self._orders.close()
        self._process.wait(60)


@functools.cache
def server() -> Server:
    """The server of this process of tests, which starts with the first run."""
    return Server()


class Forked:
    """A fork, as `Run` needs it."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None,
        out: BinaryIO,
        err: BinaryIO,
    ) -> None:
        self._words = words
        self.pid = server().fork(words, env, cwd, out, err)

    def poll(self) -> int | None:
        return server().status(self.pid, 0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = server().status(self.pid, float("inf") if timeout is None else timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(list(self._words), timeout)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedRun(Run):
    """`hybridflow WORDS` with `cluster=in-process`; fails where it imports Ray or SGLang."""

    def __init__(self, folder: Path, *words: str, cwd: Path | None = None) -> None:
        super().__init__(folder, *words, command=(), cwd=cwd)

    def _start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None,
        out: BinaryIO,
        err: BinaryIO,
    ) -> Forked:
        return Forked(words, env, cwd, out, err)
