"""A fork of a fork server against what a new interpreter would be."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.engines import guard
from hybridflow.process import fork_client
from hybridflow.process.children import state_of
from hybridflow.process.fork_client import ForkedProcess, address_of, fork

Start = Callable[..., tuple[list[str], "subprocess.Popen[bytes]"]]
ROOT = Path(__file__).parents[3]
SAYS = """
import json, os, sys
import numpy
json.dump({"argv": sys.argv, "of": os.environ.get("OF"), "left": os.environ.get("OF_THE_SERVER"), "cwd": os.getcwd(),
           "path": sys.path, "loaded": [name for name in sys.argv[1:] if name in sys.modules],
           "random": float(numpy.random.random()), "group": os.getpgid(0) == os.getpid(),
           "session": os.getsid(0) == os.getpid(), "name": __name__}, sys.stdout)
sys.exit(7)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server for each group of modules; returns their names and the first server's
    process."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(
        *groups: tuple[str, ...], path: str = "", stderr: int | None = None
    ) -> tuple[list[str], subprocess.Popen[bytes]]:
        names = [secrets.token_hex(4) for _ in groups]
        listeners = []
        words = list[str]()
        for name, modules in zip(names, groups, strict=True):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address_of(name))
            listener.listen()
            listeners.append(listener)
            words += ["/"] * bool(words) + [str(listener.fileno()), *modules]
        running.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "hybridflow.process.fork_server", *words],
                pass_fds=[listener.fileno() for listener in listeners],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{path}",
                    "OF_THE_SERVER": "1",
                    "OMP_NUM_THREADS": "1",
                },
                stderr=stderr,
            )
        )
        for listener in listeners:
            listener.close()
        return names, running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()


def _said(name: str, folder: Path, *words: str, leader: bool = False) -> dict[str, Any]:
    script = folder / "says.py"
    out = folder / "said.json"
    script.write_text(SAYS)
    with open(out, "wb") as file, open(os.devnull, "rb") as nothing:
        files = (nothing.fileno(), file.fileno(), 2)
        env = {"OF": "the order", "PATH": os.environ["PATH"]}
        assert fork(name, [str(script), *words], env, files, leader=leader).wait(120) == 7
    said: dict[str, object] = json.loads(out.read_text())
    return said


def _sleeper(name: str, *, leader: bool = False) -> ForkedProcess:
    return fork(name, ["-m", "tests.unit.process.sleeper"], os.environ, (0, 1, 2), leader=leader)


def _ends(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if state_of(pid) in ("", "Z", "X"):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_a_fork_is_a_new_interpreter_that_finds_modules_loaded(
    start: Start, tmp_path: Path
) -> None:
    (name,), _ = start(("numpy", "sqlite3"))
    first, second = (_said(name, tmp_path, "sqlite3", "decimal_of_nobody") for _ in range(2))
    assert first["argv"] == [str(tmp_path / "says.py"), "sqlite3", "decimal_of_nobody"]
    assert (first["of"], first["left"], first["name"]) == ("the order", None, "__main__")
    # no folder hides the library's modules
    assert first["cwd"] == os.getcwd() and str(tmp_path) not in first["path"]
    assert first["loaded"] == ["sqlite3"]
    assert first["random"] != second["random"]
    # whoever kills its group kills nobody else
    assert (first["group"], first["session"]) == (True, False)
    assert _said(name, tmp_path, leader=True)["session"] is True


def test_later_servers_begin_with_the_modules_of_the_first_and_add_their_own(
    start: Start, tmp_path: Path
) -> None:
    names, _ = start(("numpy",), ("sqlite3",), ("xmlrpc.client",))
    loaded = [_said(name, tmp_path, "sqlite3", "xmlrpc.client")["loaded"] for name in names]
    assert loaded == [[], ["sqlite3"], ["xmlrpc.client"]]


def test_forks_end_with_their_client_and_with_the_server_but_for_leaders(start: Start) -> None:
    (name,), server = start(())
    left = _sleeper(name)
    left.close()
    assert _ends(left.pid)
    asked = _sleeper(name)
    asked.send_signal(signal.SIGTERM)
    assert asked.wait(60) == -signal.SIGTERM
    bound = _sleeper(name)
    leader = _sleeper(name, leader=True)
    server.kill()
    server.wait()
    assert bound.wait(60) == -signal.SIGKILL
    assert _ends(bound.pid)
    assert state_of(leader.pid) not in ("", "Z", "X")
    os.kill(leader.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_guard_whose_client_ends_at_once_removes_the_folder(start: Start, tmp_path: Path) -> None:
    (name,), _ = start(())
    for number in range(5):
        folder = tmp_path / f"engine-{number}"
        words = [
            guard.__file__,
            str(os.getpid()),
            "0",
            str(folder),
            "--",
            "-m",
            "tests.unit.process.sleeper",
        ]
        process = fork(name, words, os.environ, (0, 1, 2), leader=True)
        folder.mkdir()
        process.close()
        assert _ends(process.pid)
        assert not folder.exists()


def test_a_fork_that_cannot_begin_ends_and_the_server_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,), _ = start(())
    monkeypatch.setattr(fork_client.os, "getcwd", lambda: str(tmp_path / "gone"))
    assert _sleeper(name).wait(60) == 1
    monkeypatch.undo()
    assert _said(name, tmp_path)["name"] == "__main__"


def test_the_status_of_a_process_that_ends_at_once_may_come_with_its_pid() -> None:
    name = secrets.token_hex(4)

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not connection.recv(1 << 16).endswith(b"}\n"):
                pass
            connection.sendall(b'{"pid": 4194305}\n{"status": 3}\n')

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address_of(name))
        listener.listen()
        server = threading.Thread(target=answer, args=(listener,))
        server.start()
        process = _sleeper(name)
        server.join()
        assert process.wait(60) == 3


STRANGER = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listens", flush=True)
print(listener.accept()[0].recv(1 << 16))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as another user")
def test_nothing_is_sent_to_another_user_who_has_taken_the_name() -> None:
    name = secrets.token_hex(4)
    command = [sys.executable, "-c", STRANGER, address_of(name).removeprefix("\0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == "listens\n"
        with pytest.raises(OSError, match="65534 owns the socket of fork server"):
            _sleeper(name)
        assert stranger.stdout.read() == "b''\n", "the stranger was sent something"


CROWD = """
import os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.setuid(65534)
links = []
for number in range(1000):
    link = socket.socket(socket.AF_UNIX)
    link.connect(sys.argv[1].replace("@", chr(0)))
    links.append(link)
    if number % 2:
        try:
            socket.send_fds(link, [b"\\n"], [0, 1, 2])
            link.sendall(b'{"argv": ["-c", "print(1)"], "env": {}, "cwd": "/", "leader": true}\\n')
        except OSError:
            pass  # it is closed already
answers = []
for link in links:
    try:
        answers.append(link.recv(100))
    except OSError:
        answers.append(b"")
print(set(answers))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as another user")
def test_a_thousand_connections_of_another_user_get_no_process_and_hold_nobody(
    start: Start,
) -> None:
    [name], server = start(("json",), stderr=subprocess.PIPE)
    fork(name, ["-m", "this"], os.environ, (0, 1, 2)).wait(60)  # it has loaded
    address = address_of(name).replace("\0", "@")
    crowd = subprocess.run(
        [sys.executable, "-c", CROWD, address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert crowd.stdout == "{b''}\n", crowd.stderr
    assert fork(name, ["-m", "this"], os.environ, (0, 1, 2)).wait(60) == 0
    server.kill()
    assert server.stderr is not None and server.stderr.read() == b""


@pytest.mark.parametrize("file", ["/dev/full", "a closed pipe"])
def test_a_server_that_cannot_print_goes_on(start: Start, tmp_path: Path, file: str) -> None:
    if file == "/dev/full":
        stderr = os.open(file, os.O_WRONLY)
    else:
        read, stderr = os.pipe()
        os.close(read)
    (name,), _ = start((), stderr=stderr)
    os.close(stderr)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as wrong:
            wrong.connect(address_of(name))
            wrong.sendall(b"\n{}\n")
            assert wrong.recv(1) == b""  # refused: it comes without files
    assert _said(name, tmp_path)["name"] == "__main__"


def test_no_fork_of_a_process_with_threads(start: Start, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    )
    (name,), _ = start(("threaded",), path=str(tmp_path))
    with pytest.raises(OSError, match=r"has exited|reset"):
        _sleeper(name)


@pytest.mark.slow
def test_the_script_passes_the_status_on_and_does_without_a_server(
    start: Start, tmp_path: Path
) -> None:
    (name,), _ = start(())
    script = tmp_path / "status.py"
    script.write_text(
        "import os, sys; print(os.getppid()); os.kill(os.getpid(), 9) if sys.argv[1:] else "
        "sys.exit(5)"
    )

    def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", fork_client.__file__, name, str(script), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert run(name).returncode == run("nobody").returncode == 5
    assert run(name).stdout != (alone := run("nobody").stdout)
    assert alone == f"{os.getpid()}\n"  # the client has become it
    assert run(name, "die").returncode == run("nobody", "die").returncode == -signal.SIGKILL
