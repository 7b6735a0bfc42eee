"""Joining a Ray cluster: finds its address and token, checks that it is reachable and protected,
and enforces deadlines that Ray lacks.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hybridflow.errors import ResourceError
from hybridflow.process.listening import listeners_at
from hybridflow.process.secret import without_credentials
from hybridflow.process.surroundings import is_own

Answer = TypeVar("Answer")
TOKEN_OF_SCRIPT = "~/.hybridflow-ray-token"  # where launch/ray/cluster.sh looks
ASK_S = 5.0  # timeout of one query to a gcs
_CONNECTS = 3  # connection attempts; the head may be restarting
_STRANGER_S = 60.0


def within(timeout_s: float, ask: Callable[[], Answer]) -> Answer:
    """Return the result of a Ray call that may never return. Raises TimeoutError after
    `timeout_s`."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="ask-ray", daemon=True).start()
    return answer.result(timeout_s)


def find_address(address: str) -> str:
    """Return the address at which to join a cluster: `address` itself or, if it is "auto",
    RAY_ADDRESS or the address of the only Ray cluster that this user runs on this machine. Ray's
    own "auto" must not be used, because it sends the token to any process of any user that looks
    like Ray, or to an address in /tmp/ray, which any user can create.

    Raises:
        ResourceError: `address` is "auto", and this user runs no Ray cluster, or several, on this
            machine.
    """
    if address != "auto" or (address := os.environ.get("RAY_ADDRESS") or "auto") != "auto":
        return address
    running = sorted(_running())
    noted = _noted()
    if len(running) > 1 and noted not in running:
        raise ResourceError(
            f"cluster.address=auto: you run several Ray clusters here ({', '.join(running)}); "
            "set cluster.address=HOST:PORT to one of them"
        )
    if noted in running or (noted and not running):
        return noted
    if not running:
        raise ResourceError(
            "cluster.address=auto: you run no Ray cluster on this machine; start one "
            "(launch/ray/cluster.sh), or set cluster.address=HOST:PORT to one on another machine"
        )
    return running[0]


def _running() -> set[str]:
    """Return the gcs addresses that were passed to this user's raylets on this machine."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                program, *words = (process / "cmdline").read_bytes().split(b"\0")
                if program.endswith(b"/raylet"):
                    for word in words:
                        if word.startswith(b"--gcs-address="):
                            found.add(word.partition(b"=")[2].decode())
    return found - {"", "None"}


def _noted() -> str:
    """Return the address recorded by this user's last `ray start`; empty if there is none.

    Raises:
        ResourceError: the file or its folder is a link or belongs to another user.
    """
    # same as get_default_ray_temp_dir (ray/_common/utils.py:327); Ray must not be imported before
    # its variables are set
    file = Path(
        os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp",
        "ray",
        "ray_current_cluster",
    )
    try:
        for path in (file.parent, file):
            status = path.lstat()
            if status.st_uid != os.getuid() or stat.S_ISLNK(status.st_mode):
                owner = (
                    "is a link"
                    if stat.S_ISLNK(status.st_mode)
                    else f"belongs to user {status.st_uid}"
                )
                raise ResourceError(
                    f"cluster.address=auto: {path}, in which Ray records its address, {owner}, so "
                    "your token might be sent to another user; set cluster.address=HOST:PORT"
                )
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def require_listener(address: str, timeout_s: float) -> None:
    """Raise ResourceError if nothing listens at the address, because Ray itself would retry for
    minutes. A listener on this machine must belong to this user or to root, because it will receive
    the token.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return  # Ray reports it
    deadline = time.monotonic() + timeout_s
    for attempt in range(_CONNECTS):
        left = deadline - time.monotonic()
        try:
            with socket.create_connection(
                (host.strip("[]"), int(port)), max(0.1, min(ASK_S, left))
            ) as connection:
                peer = str(connection.getpeername()[0])
                break
        except (OSError, OverflowError) as error:
            if attempt + 1 == _CONNECTS or left < 1:
                raise ResourceError(
                    f"cannot join the Ray cluster at {address}: {error}; start it, or correct "
                    "cluster.address (null starts a cluster on this machine)"
                ) from error
            time.sleep(1.0)
    if is_own(f"//{peer}" if ":" not in peer else f"//[{peer}]") and (
        strangers := listeners_at(peer, int(port)) - {os.getuid(), 0}
    ):
        raise ResourceError(
            f"the listener at {address} belongs to user {min(strangers)}, so that user would "
            "receive your token; correct cluster.address (null starts a cluster on this machine)"
        )


def plain_job_config() -> Any:
    """Return a job configuration that leaves the workers' import path unchanged. By default, Ray
    prepends the working directory, where a file random.py would shadow Python's module.
    `Host.set_up` adds the driver's path instead.
    """
    from ray.job_config import JobConfig

    class Plain(JobConfig):
        _py_driver_sys_path = property(lambda _: [], lambda _, path: None)

    return Plain()


def find_token() -> None:
    """Make Ray's client use the token in the environment, or else the token with which
    `launch/ray/cluster.sh` started Ray. Ray ignores a token unless RAY_AUTH_MODE is set.
    """
    path = Path(TOKEN_OF_SCRIPT).expanduser()
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() and path.is_file():
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def answers_strangers(address: str) -> bool:
    """Return True if Ray's gcs responds to a process without a token."""
    ask = (
        "import sys; from ray._raylet import GcsClient; "
        "GcsClient(sys.argv[1]).internal_kv_keys(b'', None, 10)"
    )
    env = {**without_credentials(), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-P", "-c", ask, address]
    try:
        asked = subprocess.run(
            command, env=env, capture_output=True, check=False, timeout=_STRANGER_S
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0
