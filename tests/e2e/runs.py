"""Start `hybridflow` as a user does, watch every process it starts, and say what is left of
them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Protocol

import psutil

from hybridflow.process.secret import without_credentials

HYBRIDFLOW = Path(sys.executable).with_name("hybridflow")
LOOPBACK = re.compile(r"127\.|::1$|::ffff:127\.")
_MARK = "HYBRIDFLOW_TEST_RUN"

# Learnt or not, sampled answers differ in their digits: every group has some gradient, unlike with
# the verifier and an untrained model.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""

Process = tuple[int, float]  # pid and start time: a pid may be used again


class Started(Protocol):
    """What a run needs of a `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


# What a shell starts in the background ignores SIGINT, and so do its children: the tests themselves
# may have been started so.
HEAR_INTERRUPTS = ("env", "--default-signal=INT")


class Run:
    """One `hybridflow ...` in a session of its own, with a temporary folder of its own.

    A thread looks at the processes once a second: it remembers all that descend from the run or
    carry its mark in their environment (daemons that were handed to init included), and every
    address that one of them listens on.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        command: Sequence[str | Path] = (HYBRIDFLOW,),
        site: Mapping[str, str | None] = MappingProxyType({}),
        cwd: Path | None = None,
    ) -> None:
        """Start it in `cwd`; output goes to `folder`/out and err. `site`: other variables of its
        environment, None unsets one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = uuid.uuid4().hex
        # short: Ray's sockets lie in it
        self.temp_dir = Path(tempfile.mkdtemp(prefix="hft-", dir="/tmp"))
        self._out = folder / f"out-{self.mark}"
        self._err = folder / f"err-{self.mark}"
        base = {
            **without_credentials(),
            _MARK: self.mark,
            "TMPDIR": str(self.temp_dir),
            "COLUMNS": "200",
        }
        env = {name: value for name, value in {**base, **site}.items() if value is not None}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = self._start([*map(str, command), *words], env, cwd, out, err)
        self.seen: dict[Process, str] = {}
        self.listening: set[tuple[str, str]] = set()
        self._strangers: set[Process] = set()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None,
        out: BinaryIO,
        err: BinaryIO,
    ) -> Started:
        return subprocess.Popen(
            [*HEAR_INTERRUPTS, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )

    # ---- what a test does
    # ----------------------------------------------------------------------------------------------

    @property
    def out(self) -> str:
        """What it has printed."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has printed to stderr."""
        return self._err.read_text(errors="replace")

    def wait_for(self, what: Callable[[], object], timeout_s: float = 240.0) -> None:
        """Until `what()` holds; fails when the run ends before, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert self.process.poll() is None, (
                f"ended early with {self.process.returncode}\n{self.out}\n{self.err}"
            )
            assert time.monotonic() < deadline, f"not within {timeout_s} s\n{self.out}\n{self.err}"
            time.sleep(0.05)

    def send(self, number: signal.Signals, *, to_all: bool = False) -> None:
        """A signal to the driver, or (as a terminal does on Ctrl-C) to its whole process group."""
        self._look()
        (os.killpg if to_all else os.kill)(self.process.pid, number)

    def end(self, timeout_s: float = 300.0) -> int:
        """The exit status, once it has ended."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"did not end within {timeout_s} s\n{self.out}\n{self.err}"
            ) from None

    def left_behind(self, within_s: float = 30.0) -> list[str]:
        """Processes that still run `within_s` seconds from now, and files in its temporary folder.
        What is left behind stays for ever; what ends by itself is waited for as long as a busy
        machine may take."""
        deadline = time.monotonic() + within_s
        while True:
            self._look()
            left = [
                f"{pid} {name}"
                for (pid, start), name in list(self.seen.items())
                if _runs(pid, start)
            ]
            left += [str(path) for path in self.temp_dir.glob("hf-*")]
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(0.2)

    def kill(self) -> None:
        """End everything (when a test has failed) and forget the temporary folder."""
        self._stop.set()
        self._thread.join()
        if self.process.poll() is None:
            self._look()
        for pid, start in self.seen:
            if _runs(pid, start):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.temp_dir, ignore_errors=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # ---- watching
    # ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self._look()
            ours = {pid: name for (pid, _), name in list(self.seen.items())}
            for connection in psutil.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.pid in ours:
                    self.listening.add((connection.laddr.ip, ours[connection.pid]))

    def _look(self) -> None:
        with self._looking:  # the thread looks, and so does the test
            self._look_once()

    def _look_once(self) -> None:
        found = {}
        for process in psutil.process_iter():
            try:
                key = (process.pid, process.create_time())
                if key in self._strangers:
                    continue
                words = " ".join(process.cmdline())[:100]
                if key in self.seen:
                    # Between fork and exec a process has the command line of its parent.
                    self.seen[key] = words or self.seen[key]
                    continue
                found[key] = (process.ppid(), self._is_marked(process), words or process.name())
            except psutil.Error:
                continue  # it ended meanwhile
        parents = {pid for pid, _ in self.seen} | {self.process.pid}
        grown = True
        while grown:
            grown = False
            for key, (parent, marked, name) in list(found.items()):
                if marked or parent in parents or key[0] == self.process.pid:
                    self.seen[key] = name
                    parents.add(key[0])
                    del found[key]
                    grown = True
        self._strangers |= found.keys()

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self.mark
        except psutil.Error:
            return False


def pid_of(run: Run, log: Path) -> int:
    """The process that writes this log."""
    run._look()
    for pid, _ in list(run.seen):
        try:
            if any(Path(file.path) == log for file in psutil.Process(pid).open_files()):
                return pid
        except psutil.Error:
            continue  # it ended meanwhile
    raise AssertionError(f"nobody writes {log}")


def _runs(pid: int, start: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == start and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
