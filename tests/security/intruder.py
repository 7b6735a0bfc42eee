"""Attempts of another user of the machine against a live run: `python -m tests.security.intruder
FACTS` imports what it needs, gives up root for uid 65534 for good, and prints one JSON list of
(attempt, what it got, "" for nothing).

FACTS is a JSON file that says where everything is, which an intruder would have to find out: pids,
listeners, folders. Its secrets serve the controls alone: the same attempts as the same user, but
with the right key, which must succeed.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import hashlib
import json
import os
import pickle
import re
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import requests
import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

from hybridflow.engines.sglang import server_changes
from hybridflow.process.secret import VARIABLE
from hybridflow.process.store import StoreClient, StoreError
from tests.security import door

CONTROL = "with the right key: "
NOBODY = 65534
WAIT_S = 1.5
RAY_S = 120  # also to load Ray on a busy machine
ZMQ_MS = 4000
OVER = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
OVER |= zmq.EVENT_DISCONNECTED
_KEY = re.compile(rb"[\w+/=-]{16,}")


class Trap:
    """Pickled code that leaves a file where its reader can write."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.path, "w")


def drop_privileges() -> None:
    """Become nobody, without a way back."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise SystemExit("still root: the attempts would show nothing")


def refused(action: Callable[..., Any], *arguments: Any) -> str:
    """What the action got; "" when the kernel or the other end refused it."""
    try:
        got = action(*arguments)
    except (OSError, EOFError, RuntimeError, requests.RequestException, zmq.ZMQError):
        return ""
    return "done" if got is None else str(got)[:200] if got else ""


# ---- files


def on_files(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Folders of Ray, of the engines and of the run, and their shared memory."""
    for name, folder in facts["private"].items():
        yield f"list {name}", refused(os.listdir, folder)
        yield f"create a file in {name}", refused(Path(folder, "intruder").write_text, "x")
        yield f"rename {name}", refused(_rename, folder)
        yield f"open {name} to all", refused(os.chmod, folder, 0o777)
        yield f"watch {name}", _watch(folder)
    for name, file in facts["files"].items():
        yield f"write {name}", refused(_open, file, "r+b")
        yield f"replace {name}", refused(_rename, file)
    for folder in facts["open"]:
        yield f"create a file in {folder}", refused(Path(folder, "intruder").write_text, "x")
        yield f"find a key in {folder}", refused(_find_key, folder, facts["digests"])
    for file in facts["locks"]:
        # who can open it can hold it before the next start of the run
        yield f"open {file}", refused(_open, file, "rb")
        yield f"hold {file}", refused(_hold, file)
    for name, file in facts["secret_files"].items():
        yield f"read {name}", refused(_open, file, "rb")
    for file in facts["shared_memory"]:
        yield f"read {file}", refused(_open, file, "rb")
        yield f"write {file}", refused(_open, file, "r+b")
        yield f"remove {file}", refused(os.unlink, file)


def _rename(path: str) -> str:
    os.rename(path, f"{path}-moved")
    os.rename(f"{path}-moved", path)
    return "renamed"


def _open(path: str, mode: str) -> str:
    with open(path, mode):
        return "open"


def _hold(file: str) -> str:
    with open(file, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "held"


def _find_key(folder: str, digests: list[str]) -> str:
    """Which of the files that can be read holds a credential, by its digest."""
    for path in sorted(Path(folder).iterdir()):
        with suppress(OSError):
            text = path.read_bytes() if path.is_file() else b""
            if any(hashlib.sha256(word).hexdigest() in digests for word in _KEY.findall(text)):
                return path.name
    return ""


def _watch(folder: str) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.inotify_init()
    return "watching" if libc.inotify_add_watch(queue, folder.encode(), 0xFFF) >= 0 else ""


# ---- processes


def on_processes(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The environment, memory, descriptors and command lines of the run's processes, and signals to
    them."""
    pids = facts["pids"]
    for what in ("environ", "mem", "maps", "fd/0", "fd/1"):
        yield f"read {what} of the processes", _first(_open_of_process, pids, what)
    yield "list descriptors", _first(lambda pid: os.listdir(f"/proc/{pid}/fd"), pids)
    yield "trace", _first(_trace, pids)
    yield "stop", _first(os.kill, pids, 19)
    commands = b"".join(
        Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if os.path.exists(f"/proc/{pid}")
    )
    words = {word for part in commands.split(b"\0") for word in (part, *part.split(b"="))}
    found = any(hashlib.sha256(word).hexdigest() in facts["digests"] for word in words)
    yield "find a key in a command line", "found" if found else ""


def _open_of_process(pid: int, what: str) -> str:
    with open(f"/proc/{pid}/{what}", "rb") as file:
        file.read(1)
    return "open"


def _trace(pid: int) -> str:
    attach = 16
    return "traced" if ctypes.CDLL(None).ptrace(attach, pid, 0, 0) == 0 else ""


def _first(action: Callable[..., Any], pids: list[int], *arguments: Any) -> str:
    return next((f"{pid}: {got}" for pid in pids if (got := refused(action, pid, *arguments))), "")


# ---- sockets


def on_unix_sockets(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Sockets with a name: connect, replace, and push a pickle."""
    for path in facts["unix"]:
        yield f"connect to {path}", refused(_connect_unix, path)
        yield f"replace {path}", refused(_rename, path)


def on_fork_servers(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Servers that would start a process of the run's user: ask for one, take the name, hold it
    with silence."""
    for name in facts["fork_servers"]:
        path = "\0" + name.removeprefix("@")
        yield f"have a process started by {name}", refused(_order, path, facts["trap"])
        yield f"take the name {name}", refused(_take_name, path)
        for sent in (b"", b"\n", b"x" * (1 << 16), b'{"argv": "'):
            yield f"hold {name} with {len(sent)} bytes", refused(_order_bytes, path, sent)


def _order(path: str, trap: str) -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(2 * WAIT_S)
        link.connect(path)
        socket.send_fds(link, [b"\n"], [0, 1, 2])
        order = {"argv": ["-c", f"open({trap!r}, 'w')"], "env": {}, "cwd": "/", "leader": True}
        link.sendall(json.dumps(order).encode() + b"\n")
        return link.recv(100).decode()


def _order_bytes(path: str, sent: bytes) -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(2 * WAIT_S)
        link.connect(path)
        link.sendall(sent)
        return link.recv(100).decode()


def _take_name(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.bind(path)
        return "taken"


def _connect_unix(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(WAIT_S)
        link.connect(path)
        return "connected"


def on_tcp(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every TCP listener, in the languages that are spoken there: torch's store, ours, ZeroMQ, bare
    bytes."""

    def one(role: str, host: str, port: int) -> list[tuple[str, str]]:
        at = f"{role} at {port}"
        return [
            (f"push a pickle over ZeroMQ to {at}", refused(_zmq_push, host, port, facts["trap"])),
            (f"send bare pickles to {at}", refused(_bytes, host, port, facts["trap"])),
        ]

    tries: dict[str, tuple[Any, ...]] = {"speak torch's store": (_torch_store,)}
    for control, secret in (("", secrets.token_hex(32)), (CONTROL, facts["job_secret"])):
        tries[f"{control}speak our store"] = _our_store, secret
        tries[f"{control}shake hands over ZeroMQ"] = _curve, secret
    whole = [(name, what, at) for name, what in tries.items() for at in facts["tcp"]]
    for some in batched(whole, 16):  # before there are threads
        forks = [_fork(action, host, port, *key) for _, (action, *key), (_, host, port) in some]
        for (name, _, (role, _, port)), fork in zip(some, forks, strict=True):
            yield f"{name} to {role} at {port}", _result(fork)
    with ThreadPoolExecutor(16) as pool:
        for found in pool.map(lambda at: one(*at), facts["tcp"]):
            yield from found


def _torch_store(host: str, port: int) -> str:
    store = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=WAIT_S)
    )
    store.set("intruder", "1")
    return f"{store.num_keys()} keys"


def batched(rows: list[Any], size: int) -> Iterator[list[Any]]:
    """The rows in lists of at most `size`."""
    yield from (rows[i : i + size] for i in range(0, len(rows), size))


def _our_store(host: str, port: int, secret: str) -> str:
    os.environ[VARIABLE] = secret
    try:
        store = StoreClient(host, port, 2 * WAIT_S)
    except StoreError:
        return ""
    return f"{store.num_keys()} keys"


def _zmq_push(host: str, port: int, trap: str) -> str:
    """Whether a ZeroMQ peer without the job's key gets through the handshake."""
    context = zmq.Context()
    try:
        for kind in (zmq.PUSH, zmq.DEALER, zmq.SUB):
            link = context.socket(kind)
            monitor = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | OVER)
            link.connect(f"tcp://{host}:{port}")
            if (
                monitor.poll(ZMQ_MS)
                and recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            ):
                if kind != zmq.SUB and link.poll(ZMQ_MS, zmq.POLLOUT):
                    link.send(pickle.dumps(Trap(trap)))
                return f"handshake as {kind}"
            link.disable_monitor()
            link.close()
        return ""
    finally:
        context.destroy(linger=ZMQ_MS)  # what was sent leaves first


def _curve(host: str, port: int, secret: str) -> str:
    """Whether a ZeroMQ peer with the keys of this job secret gets through the handshake."""
    os.environ[VARIABLE] = secret
    context = zmq.Context()
    poller = zmq.Poller()
    # an end takes what fits its own kind
    links = [context.socket(kind) for kind in (zmq.PUSH, zmq.DEALER, zmq.SUB)]
    for link in links:
        poller.register(link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED), zmq.POLLIN)
        server_changes.connect(zmq.Socket.connect, link, f"tcp://{host}:{port}")
    try:
        return "handshake" if poller.poll(ZMQ_MS) else ""
    finally:
        context.destroy(linger=0)


def _bytes(host: str, port: int, trap: str) -> str:
    data = pickle.dumps(Trap(trap))
    for head in (
        b"",
        struct.pack("<Q", len(data)),
        struct.pack(">Q", len(data)),
        bytes(8),
        bytes(32),
    ):
        with socket.create_connection((host, port), timeout=WAIT_S) as link:
            link.sendall(head + data)
    return ""


def on_engines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The engines' HTTP interface without the key, with a guessed one, and with a pickle for
    weights."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
    packed = base64.b64encode(pickle.dumps([("w", Trap(facts["trap"]))])).decode()
    tensors = {
        "serialized_named_tensors": [packed],
        "load_format": "hybridflow.engines.sglang.weight_receiver.load",
    }
    asked = {
        "/generate": body,
        "/update_weights_from_tensor": tensors,
        "/update_weights_from_disk": {"model_path": facts["trap"]},
        "/init_weights_update_group": {
            "master_address": "127.0.0.1",
            "master_port": 9,
            "world_size": 2,
        },
        "/pause_generation": {"mode": "abort"},
        "/flush_cache": {},
        "/weights_checker": {"action": "checksum"},
        "/server_info": None,
        "/get_model_info": None,
        "/v1/models": None,
        "/health": None,
        "/health_generate": None,
        "/ready": None,
        "/metrics": None,
        "/abort_request": {"rid": "", "abort_all": True},
    }
    keys = {"no key": {}, "a guessed key": {"Authorization": "Bearer " + "0" * 32}}
    for url in facts["engines"]:
        for key in facts["engine_keys"]:
            header = {"Authorization": f"Bearer {key}"}
            yield f"{CONTROL}/v1/models of {url}", refused(_http, url + "/v1/models", None, header)
        for path, data in asked.items():
            for name, header in keys.items():
                yield f"{path} with {name}", refused(_http, url + path, data, header)
        yield from door.attempts(door.Door(url.removeprefix("http://"), "", 50, {}, is_ours=False))


def _http(url: str, body: Any, headers: dict[str, str]) -> str:
    method = "GET" if body is None else "POST"
    answer = requests.request(method, url, json=body, headers=headers, timeout=2 * WAIT_S)
    return f"{answer.status_code} {answer.text[:80]}" if answer.status_code < 400 else ""


def on_ray(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Ray's gcs without a token and with a guessed one, and its agents' HTTP."""
    tokens = {"with a guessed token: ": "0" * 64, CONTROL: facts["ray_token"]}
    forks = {
        name: _fork(_gcs, facts["gcs"], token, within_s=RAY_S) for name, token in tokens.items()
    }
    for name, fork in ({"without a token: ": facts["without_token"]} | forks).items():
        yield f"{name}keys of Ray's gcs", _result(fork)
    paths = ("/", "/metrics", "/get_or_create_runtime_env")
    asked = [(*at, path) for at in facts["tcp"] if at[0].startswith("Ray") for path in paths]

    def one(role: str, host: str, port: int, path: str) -> tuple[str, str]:
        return f"GET {path} of {role} at {port}", refused(
            _http, f"http://{host}:{port}{path}", None, {}
        )

    with ThreadPoolExecutor(64) as pool:  # who speaks gRPC alone lets a client wait
        yield from pool.map(lambda at: one(*at), asked)


def _gcs(address: str, token: str) -> str:
    # here: tests that start a cluster must be the first to import Ray
    from ray._raylet import GcsClient

    os.environ["RAY_AUTH_TOKEN"] = token
    return str(GcsClient(address).internal_kv_keys(b"", None, 5))


def _gcs_without_token(address: str) -> str:
    """For a process that has not loaded Ray, which takes its settings as it is loaded."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray._raylet  # noqa: F401

    drop_privileges()
    return _gcs(address, "")


def _fork(action: Callable[..., str], *arguments: Any, within_s: int = 10) -> tuple[int, int]:
    """Start the action in a fork; its pid and where `_result` reads. torch's store waits without
    end for who does not speak its language, and this user may start no Python of root's."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(within_s)
        os.write(write, refused(action, *arguments).encode()[:1000])
        os._exit(0)
    os.close(write)
    return pid, read


def _result(fork: tuple[int, int]) -> str:
    pid, read = fork
    with open(read, "rb") as answer:
        got = answer.read().decode()
    os.waitpid(pid, 0)
    return got


def warm_up() -> None:
    """Load what is loaded on first use: modules under root's home cannot be read afterwards."""
    "x".encode("idna")
    os.environ["RAY_AUTH_MODE"] = "token"  # Ray takes its settings as it is loaded
    import ray._raylet  # noqa: F401

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        port = listener.getsockname()[1]
        refused(_http, f"http://127.0.0.1:{port}/", None, {})
        _zmq_push("127.0.0.1", port, "")
        for action in (_our_store, _curve):
            refused(action, "127.0.0.1", port, "x")
    os.environ.pop(VARIABLE)


ATTEMPTS = (on_files, on_processes, on_unix_sockets, on_tcp, on_engines, on_fork_servers, on_ray)

if __name__ == "__main__":
    known = json.loads(Path(sys.argv[1]).read_text())
    if on_ray in ATTEMPTS[: known["kinds"]]:
        known["without_token"] = _fork(_gcs_without_token, known["gcs"], within_s=RAY_S)
    warm_up()
    drop_privileges()
    answers = []
    for attempts in ATTEMPTS[: known["kinds"]]:
        began = time.monotonic()
        answers += attempts(known)
        print(f"{attempts.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    print(json.dumps(answers))
