"""Process management for an engine that runs as an HTTP server on loopback: startup as a child of
this process, liveness checks and shutdown. Each kind of server provides the command, the
environment and a probe request.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import requests

from hybridflow.engines import guard
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError
from hybridflow.process.fork_client import ForkedProcess, fork
from hybridflow.process.listening import listeners_at
from hybridflow.process.private_folder import compiled_code, parent_of_private
from hybridflow.process.secret import VARIABLE, digest, job_secret, without_credentials
from hybridflow.process.surroundings import SAFE_PATH, without_proxy


def direct_session() -> requests.Session:
    """Create a session that bypasses proxies. Proxies must neither see nor break calls to this
    machine.
    """
    session = requests.Session()
    session.trust_env = False
    return session


HOST = "127.0.0.1"
POLL_S = 0.1
LOG_TAIL_LINES = 40
_LEAST_SHARED_MEMORY = 1 << 20  # bytes; below this, processes of an engine are killed by SIGBUS
# bytes reserved for the servers' socket names, a uuid (vllm/utils/network_utils.py)
_SOCKET_ROOM = 45
# SGLang checks for SIGTERM every 5 s (sglang/srt/managers/tokenizer_manager.py:3510)
GRACE_S = {"cpu": 0.0, "cuda": 8.0}
INHERITED_BY_RANKS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Format `{"tp-size": 2, "flag": True}` as `--tp-size 2 --flag`. False and None are omitted."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        if isinstance(value, (list, tuple)):
            words += [str(item) for item in value]
        else:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def common_environment(spec: EngineSpec, folder: str) -> dict[str, str]:
    """Return the base environment for a server: this process's environment without the variables of
    its distributed rank, and restricted to loopback.
    """
    env = {
        k: v
        for k, v in without_credentials().items()
        if k not in INHERITED_BY_RANKS and not k.startswith("TORCHELASTIC_")
    }
    env |= without_proxy(env)  # for a server's calls to its own address, and among its ranks
    env |= SAFE_PATH
    env |= {
        VARIABLE: job_secret(),  # the ranks connect to the trainer's store
        "TMPDIR": folder,  # for the server's zmq sockets, removed with the folder
        "TOKENIZERS_PARALLELISM": "false",
    }
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled_code())
    if spec.host.startswith("127."):
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if Path(spec.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if spec.device == "cpu":
        env["OMP_NUM_THREADS"] = str(spec.threads)
    if spec.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.devices)
    return env


def reserve_port(ports: range) -> tuple[int, ExitStack]:
    """Return an unused port from `ports`, and a lock that reserves the port until the lock is
    closed.

    The lock consists of two abstract Unix sockets, which prevent two engines on this machine from
    choosing the same port before either listens. The first socket's name is the same for all
    engines on the machine, so an attacker could occupy all such names. In that case only the second
    socket is used, whose name is known only to this job.

    Raises:
        EngineError: no port is free.
    """
    tried = random.SystemRandom().sample(ports, min(len(ports), 200))
    for is_known in (True, False):
        for port in tried:
            names = [
                digest("engine port", str(port)).hex(),
                *([f"engine-port-{port}"] if is_known else []),
            ]
            with ExitStack() as lock, suppress(OSError):
                for name in names:
                    lock.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0hybridflow-{name}")
                with socket.socket() as probe:
                    probe.bind((HOST, port))
                return port, lock.pop_all()
    raise EngineError(
        f"no free port between {ports.start} and {ports.stop}; stop the processes that listen on "
        "these ports"
    )


class ServerProcess:
    """The process of one server. `start` returns immediately: call it for all engines, then
    `wait_ready` for each.

    Args:
        spec: the engine's spec.
        log_path: file for the output of all server processes; its folder is created.
        check: also called by `check_alive`; raises EngineError if a remote component that the
            engine depends on is lost.
    """

    def __init__(
        self, spec: EngineSpec, log_path: str | Path, check: Callable[[], None] = lambda: None
    ) -> None:
        self.spec = spec
        self.log_path = Path(log_path)
        self._check = check
        self.admin_key = secrets.token_hex(16)
        self.port = 0
        self._lock: ExitStack | None = None
        self._folder = ""
        self._guard: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._store: Any = None

    # ---- implemented by each kind of server

    def _prepare(self) -> None:
        """Validate the spec and fill in missing values. Called before any process is started."""

    def _command(self) -> list[str]:
        """Return the arguments for the Python interpreter: `-m`, the server's module and its
        arguments.
        """
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        """Return the environment of the server's processes."""
        raise NotImplementedError

    def _fill(self, folder: Path) -> None:
        """Write the server's private files to `folder`, which is renamed to its final name before
        the server starts."""

    def _one_token(self) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a one-token request. It is used to probe whether the
        server responds.
        """
        raise NotImplementedError

    # ---- start and end

    @property
    def url(self) -> str:
        """Base address of the HTTP interface, on loopback."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Pid of the guard, which is also the session id of all the engine's processes; 0 before
        the start.
        """
        return self._guard.pid if self._guard else 0

    def start(self) -> None:
        """Start the processes without waiting for them. They exit with this process, even if it is
        killed."""
        if self._guard is not None:
            raise EngineError("already started", engine=self.spec.name)
        self._prepare()
        self.port, self._lock = reserve_port(self.spec.ports)
        # created once the guard is watching; until then the guard knows only the name
        name = f"hf-engine-{secrets.token_hex(4)}"
        self._folder = str(parent_of_private(len(name), _SOCKET_ROOM) / name)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = self._command()
        env = self._environment()
        watch = [
            guard.__file__,
            str(os.getpid()),
            str(GRACE_S[self.spec.device]),
            self._folder,
            "--",
        ]
        # readable by this user only, because a server may log its arguments, keys included
        with (
            open(
                self.log_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)
            ) as log,
            open(os.devnull, "rb") as nothing,
        ):
            files = (nothing.fileno(), log.fileno(), log.fileno())
            if self.spec.fork_server and not self.spec.python:
                with suppress(OSError):  # the fork server has exited: start without it
                    self._guard = fork(
                        self.spec.fork_server, [*watch, *command], env, files, leader=True
                    )
            if self._guard is None:
                guarded = [
                    sys.executable,
                    "-S",
                    *watch,
                    self.spec.python or sys.executable,
                    *command,
                ]
                self._guard = subprocess.Popen(
                    guarded,
                    stdin=files[0],
                    stdout=files[1],
                    stderr=files[2],
                    env=env,
                    start_new_session=True,
                )
        try:
            # the guard waits for the folder
            unfinished = Path(self._folder + guard.UNFINISHED)
            unfinished.mkdir(mode=0o700)
            self._fill(unfinished)
            unfinished.rename(self._folder)
        except OSError:
            self.stop()
            raise

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the engine has answered a one-token request (on nodes other than the first,
        until it has loaded its model).

        Args:
            timeout_s: timeout in seconds; None uses the spec's `start_timeout_s`.

        Raises:
            EngineError: the engine exited or was not ready in time. The message includes the log
                tail, and no process is left running.
        """
        limit = self.spec.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        asked = [("/health", None), *([self._one_token()] if self.spec.node_rank == 0 else [])]
        try:
            for path, body in asked:
                while not self._answers(
                    path, body, max(0.1, deadline - time.monotonic()) if body else 5.0
                ):
                    self.check_alive()
                    if time.monotonic() > deadline:
                        raise self._ended(f"not ready after {limit:.0f} s")
                    time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise
        # The guard scans for shared memory only every few seconds, and an engine killed before the
        # next scan would leave its files behind.
        guard.note_shared_memory(
            self._folder, guard.shared_memory_of(guard.session_members(self.pid))
        )

    def _answers(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> bool:
        if listeners_at(HOST, self.port) != {os.getuid()}:
            return False  # not listening yet; if another user is listening, do not send our key
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        try:
            with direct_session() as session:
                answer = session.request(
                    "POST" if body else "GET",
                    self.url + path,
                    json=body,
                    timeout=timeout_s,
                    headers=headers,
                )
        except requests.RequestException:
            return False  # not listening yet: the caller checks liveness and deadline
        return answer.status_code == 200

    def check_alive(self) -> None:
        """Raise EngineError if the engine is not running. Takes one system call: a server's main
        process exits when any of its children exits, so only the main process is checked.

        Raises:
            EngineError: the engine was never started or has exited. The message includes the log
                tail.
        """
        if self._guard is None:
            raise EngineError("not started", engine=self.spec.name)
        status = self._guard.poll()
        if status is not None:
            raise self._ended(f"exited with status {status}")
        self._check()

    def _ended(self, what: str) -> EngineError:
        """Return the error for an engine that is not running. It reports full shared memory,
        because writing to it kills a process with SIGBUS and leaves no trace in the log.
        """
        free = shutil.disk_usage(guard.SHARED_MEMORY_PREFIX).free
        if free >= _LEAST_SHARED_MEMORY:
            return EngineError(what, engine=self.spec.name, log_tail=self.log_tail())
        return EngineError(
            f"{what}: {guard.SHARED_MEMORY_PREFIX} is full ({free >> 10} KiB free); remove files "
            "that other programs left there, or enlarge it (in containers with --shm-size). Its "
            f"log is {self.log_path}",
            engine=self.spec.name,
        )

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log, with the key masked; an empty string if there is no
        log."""
        if not self.log_path.exists():
            return ""
        with open(self.log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 200 * lines))
            text = log.read().decode("utf-8", errors="replace").replace(self.admin_key, "***")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Stop all processes of the engine within about 10 s, and remove its temporary files. Safe
        to call repeatedly.

        On CPU the processes are killed immediately, since an engine has no state worth saving. On
        CUDA, they are given a few seconds to release device memory themselves.

        Raises:
            EngineError: a process could not be killed.
        """
        process = self._guard
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE_S[self.spec.device] + 6.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # only if the guard itself was killed
        leftovers = guard.shared_memory_of(guard.session_members(process.pid))
        leftovers |= guard.noted_shared_memory(self._folder)
        still_there = guard.kill_session(process.pid)
        guard.remove_shared_memory(leftovers)
        guard.remove(self._folder)
        if self._lock is not None:
            self._lock.close()
        self._store = None
        if still_there:
            raise EngineError(
                f"could not kill processes {still_there}",
                engine=self.spec.name,
                log_tail=self.log_tail(),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
