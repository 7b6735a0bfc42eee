"""Each door of a run, opened again, is seen: else to find nothing would show nothing. Some are
opened in a live run by hand, others by a process that does what none may."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.security import launchers
from tests.security.attempts import attempts_of_nobody, facts_of
from tests.security.inventory import edges_of, take

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of another user"),
]
# ---- by hand, in a live run


KEY = "0123456789abcdef" * 2
LISTEN = "import socket; link = socket.create_server(('0.0.0.0', 0))"
HTTP = """
import threading
from http.server import *
class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass
threading.Thread(target=HTTPServer(('127.0.0.1', 0), Quiet).serve_forever, daemon=True).start()
"""
ZMQ = "import zmq; link = zmq.Context().socket(zmq.PULL); link.bind('tcp://127.0.0.1:*')"
GRPC = """
import grpc
from concurrent.futures import ThreadPoolExecutor
class Any(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
server = grpc.server(ThreadPoolExecutor(1))
server.add_generic_rpc_handlers((Any(),))
server.add_insecure_port("127.0.0.1:0")
server.start()
"""
PROGRAMS = {
    "a key in a command line": ("", ("--api-key", KEY), "has a credential in its command line"),
    "a process of another user": (
        "import os; os.setuid(65534)",
        (),
        "of the user 65534 has credentials",
    ),
    "every address": (LISTEN, (), r"listens at 0\.0\.0\.0:.* shows no guard"),
    "HTTP without a key": (HTTP, (), "answers somebody without a key: HTTP 200"),
    "ZeroMQ without CURVE": (ZMQ, (), "answers somebody without a key: ZeroMQ NULL"),
    "gRPC without a token": (GRPC, (), "answers somebody without a key: gRPC answered"),
}


@pytest.mark.parametrize("door", PROGRAMS)
def test_the_inventory_sees_what_a_process_does(door: str) -> None:
    source, words, fault = PROGRAMS[door]
    command = [sys.executable, "-c", f"{source}\nprint(flush=True); input()", "hybridflow", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "API_KEY": KEY}
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        faults = take([psutil.Process(process.pid)]).faults
        process.communicate(b"\n")
    assert [bool(re.search(fault, line)) for line in faults] == [True], faults


@pytest.fixture(scope="module")
def live() -> Iterator[launchers.Live]:
    with launchers.shared_folder() as shared, launchers.local(shared) as run:
        yield run


def one_of(live: launchers.Live, kind: str, end: str = "", has: str = "") -> Path:
    """A path of this kind of the run."""
    found = [edge for edge in edges_of(live.processes(), live.run_folders) if edge.kind == kind]
    return Path(next(edge.name for edge in found if edge.name.endswith(end) and has in edge.name))


@contextmanager
def mode(path: Path, opened: int) -> Iterator[None]:
    """The path with another mode."""
    before = path.stat().st_mode & 0o7777
    path.chmod(opened)
    try:
        yield
    finally:
        path.chmod(before)


def ray_folder(live: launchers.Live) -> Path:
    return next(
        path
        for path in one_of(live, "file", has="/hf-ray-").parents
        if path.name.startswith("hf-ray-")
    )


@contextmanager
def keys_readable(live: launchers.Live) -> Iterator[None]:
    keys = one_of(live, "file", "/keys.yaml")
    with mode(keys.parent, 0o755), mode(keys, 0o644):
        yield


def _key(live: launchers.Live) -> str:
    return str(yaml.safe_load(one_of(live, "file", "/keys.yaml").read_text())["api-key"])


@contextmanager
def key_in_a_log(live: launchers.Live) -> Iterator[None]:
    log = live.folder / "logs" / "leak.log"
    log.write_text(f"the key is {_key(live)}\n")
    try:
        yield
    finally:
        log.unlink()


# how it is opened, what the inventory says, and the attempt of another user that succeeds
BY_HAND: dict[str, tuple[Callable[[launchers.Live], AbstractContextManager[None]], str, str]] = {
    "Ray's folder": (
        lambda live: mode(ray_folder(live), 0o777),
        "/hf-ray-.* others can list, write, enter",
        r"create a file in .*/hf-ray-[\w-]+$",
    ),
    "an engine's folder": (
        lambda live: mode(one_of(live, "file", "/keys.yaml").parent, 0o755),
        "/hf-engine-.*enter",
        r"list .*/hf-engine-[\w-]+$",
    ),
    "an engine's keys": (
        keys_readable,
        r"keys\.yaml .*: others can read",
        r"read .*/keys\.yaml$",
    ),
    "the run folder's lock": (
        lambda live: mode(one_of(live, "lock", ".e2e.lock"), 0o644),
        "lock .* others can read",
        r"open .*\.e2e\.lock$",
    ),
    "shared memory": (
        lambda live: mode(one_of(live, "shared memory"), 0o666),
        "shared memory .* others can read",
        "write /dev/shm/",
    ),
    "a folder of the run": (
        lambda live: mode(live.folder / "logs", 0o777),
        "logs .*others can list, write, enter",
        "create a file in .*/logs$",
    ),
    "a key in a log": (key_in_a_log, "leak.log holds a credential", "find a key in .*/logs$"),
}


@pytest.mark.full
@pytest.mark.parametrize("door", BY_HAND)
def test_the_inventory_sees_a_door_opened_by_hand(live: launchers.Live, door: str) -> None:
    opened, fault, _ = BY_HAND[door]
    with opened(live):
        faults = take(live.processes(), live.run_folders).faults
    assert any(re.search(fault, line) for line in faults), faults


@pytest.fixture(scope="module")
def facts(live: launchers.Live) -> dict[str, Any]:
    """What an intruder knows of the run with every door closed, for attempts on files."""
    processes = live.processes()
    taken = take(processes, live.run_folders)
    assert taken.faults == ()
    return {**facts_of(taken, processes, live.run_folders[0]), "kinds": 1}


@pytest.mark.full
@pytest.mark.parametrize("door", BY_HAND)
def test_another_user_gets_in_by_a_door_opened_by_hand(
    live: launchers.Live, facts: dict[str, Any], door: str, tmp_path: Path
) -> None:
    opened, _, attempt = BY_HAND[door]
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    with opened(live):
        got = [name for name, what in attempts_of_nobody(tmp_path / "facts.json") if what]
    assert any(re.search(attempt, name) for name in got), got


@pytest.mark.full
def test_another_user_finds_a_key_in_a_command_line(
    live: launchers.Live, facts: dict[str, Any], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "input()", "--api-key", _key(live)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        told = {**facts, "pids": [process.pid], "kinds": 2}
        (tmp_path / "facts.json").write_text(json.dumps(told))
        got = [name for name, what in attempts_of_nobody(tmp_path / "facts.json") if what]
        process.communicate(b"\n")
    assert got == ["find a key in a command line"]


# ---- at the OpenAI endpoint

UNBOUNDED = """
from hybridflow.agents import callers
callers._MOST_STRANGERS = 10**9
"""


@pytest.mark.full
def test_without_places_for_strangers_the_attempts_at_the_endpoint_are_seen(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNBOUNDED)
    command = [sys.executable, "-m", "pytest", "-q", "tests/security/test_door.py", "-k", "few"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 1 and "assert most_open <= " in done.stdout, done.stdout[-3000:]
