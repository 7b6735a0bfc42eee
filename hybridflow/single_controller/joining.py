"""Joining a Ray cluster: its token, whether anything answers at its address, and deadlines that Ray
itself keeps to none of."""

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
ASK_S = 5.0  # for one question to a gcs
_CONNECTS = 3  # to a head that may just be restarting
_STRANGER_S = 60.0


def within(timeout_s: float, ask: Callable[[], Answer]) -> Answer:
    """What a call of Ray's returns, which may keep to no deadline; TimeoutError after
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
    """Where a cluster is joined: `address`, and for "auto" RAY_ADDRESS, or the one Ray that this
    user runs here.

    Ray's own "auto" takes whatever process of any user looks like Ray's, else what stands in
    /tmp/ray, which anybody may have made; the token would be sent there.

    Raises:
        ResourceError: "auto", and this user runs no Ray here or several.
    """
    if address != "auto" or (address := os.environ.get("RAY_ADDRESS") or "auto") != "auto":
        return address
    running = sorted(_running())
    noted = _noted()
    if len(running) > 1 and noted not in running:
        raise ResourceError(
            f"cluster.address=auto: several Ray clusters of yours run here ({', '.join(running)}); "
            "name one as cluster.address=HOST:PORT"
        )
    if noted in running or (noted and not running):
        return noted
    if not running:
        raise ResourceError(
            "cluster.address=auto: no Ray of yours runs on this machine; start one "
            "(launch/ray/cluster.sh), or name another machine's as cluster.address=HOST:PORT"
        )
    return running[0]


def _running() -> set[str]:
    """The addresses that raylets of this user on this machine were started with."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                program, *words = (process / "cmdline").read_bytes().split(b"\0")
                if program.endswith(b"/raylet"):
                    found |= {
                        word.partition(b"=")[2].decode()
                        for word in words
                        if word.startswith(b"--gcs-address=")
                    }
    return found - {"", "None"}


def _noted() -> str:
    """What the last `ray start` of this user noted; empty without one.

    Raises:
        ResourceError: the note, or its folder, is a link or another user's.
    """
    # as get_default_ray_temp_dir (ray/_common/utils.py:327); Ray is not imported before its
    # variables are set
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
                    else f"is of the user with the number {status.st_uid}"
                )
                raise ResourceError(
                    f"cluster.address=auto: {path}, where Ray notes what it has started, {owner}, "
                    "and your token would be sent where it says; name the cluster as "
                    "cluster.address=HOST:PORT"
                )
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def require_listener(address: str, timeout_s: float) -> None:
    """Raise ResourceError unless something takes connections at the address, which Ray would try
    for minutes, and on this machine unless it is this user's or root's: who listens there is sent
    the token."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return  # Ray's own complaint
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
            f"at {address} listens the user with the number {min(strangers)}, who would be sent "
            "your token: correct cluster.address (null starts a cluster on this machine)"
        )


def plain_job_config() -> Any:
    """A configuration that leaves the import path of workers as it is. Ray's own puts the working
    directory in front, where a file random.py would hide Python's module; `Host.set_up` brings the
    driver's path."""
    from ray.job_config import JobConfig

    class Plain(JobConfig):
        _py_driver_sys_path = property(lambda _: [], lambda _, path: None)

    return Plain()


def find_token() -> None:
    """Let Ray's client use the token of the environment, or the one that `launch/ray/cluster.sh`
    starts Ray with. Ray itself ignores a token unless RAY_AUTH_MODE says that there is one."""
    path = Path(TOKEN_OF_SCRIPT).expanduser()
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() and path.is_file():
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def answers_strangers(address: str) -> bool:
    """Whether Ray's gcs answers a process without a token."""
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
