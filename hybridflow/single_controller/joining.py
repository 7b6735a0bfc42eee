"""Joining a Ray cluster: its token, whether anything answers at its address, and deadlines that Ray itself keeps to
none of."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import ResourceError
from hybridflow.process.secret import without_credentials

Answer = TypeVar("Answer")
TOKEN_OF_SCRIPT = "~/.hybridflow-ray-token"  # where launch/ray/cluster.sh looks
ASK_S = 5.0  # for one question to a gcs
_CONNECTS = 3  # to a head that may just be restarting
_STRANGER_S = 60.0


def within(timeout_s: float, ask: Callable[[], Answer]) -> Answer:
    """What a call of Ray's returns, which may keep to no deadline; TimeoutError after `timeout_s`."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="ask-ray", daemon=True).start()
    return answer.result(timeout_s)


def require_listener(config: ClusterConfig) -> None:
    """Raise ResourceError unless something takes connections at `cluster.address`, which Ray would try for minutes."""
    host, _, port = str(config.address).rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return  # "auto", or Ray's own complaint
    deadline = time.monotonic() + config.start_timeout_s
    for attempt in range(_CONNECTS):
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host.strip("[]"), int(port)), max(0.1, min(ASK_S, left))).close()
        except (OSError, OverflowError) as error:
            if attempt + 1 == _CONNECTS or left < 1:
                raise ResourceError(
                    f"cannot join the Ray cluster at {config.address}: {error}; start it, or correct cluster.address "
                    "(null starts a cluster on this machine)"
                ) from error
            time.sleep(1.0)
    return None


def plain_job_config() -> Any:
    """A configuration that leaves the import path of workers as it is. Ray's own puts the working directory in front,
    where a file random.py would hide Python's module; `Host.set_up` brings the driver's path."""
    from ray.job_config import JobConfig

    class Plain(JobConfig):
        _py_driver_sys_path = property(lambda _: [], lambda _, path: None)

    return Plain()


def find_token() -> None:
    """Let Ray's client use the token of the environment, or the one that `launch/ray/cluster.sh` starts Ray with. Ray
    itself ignores a token unless RAY_AUTH_MODE says that there is one."""
    path = Path(TOKEN_OF_SCRIPT).expanduser()
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() and path.is_file():
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def answers_strangers(address: str) -> bool:
    """Whether Ray's gcs answers a process without a token."""
    ask = "import sys; from ray._raylet import GcsClient; GcsClient(sys.argv[1]).internal_kv_keys(b'', None, 10)"
    env = {**without_credentials(), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-P", "-c", ask, address]
    try:
        asked = subprocess.run(command, env=env, capture_output=True, check=False, timeout=_STRANGER_S)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0
