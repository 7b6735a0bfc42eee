"""Proxies, long temporary folders and modules of the working directory do not reach between a run's
processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import requests

from hybridflow.engines.server import ServerProcess, common_environment
from hybridflow.engines.spec import EngineSpec
from hybridflow.process import surroundings
from hybridflow.process.surroundings import import_path, is_own, own_addresses, without_proxy
from hybridflow.rewards.lines import start_process

NOWHERE = "http://127.0.0.1:9"


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "own"),
    [
        *(
            (f"http://{host}:8000/v1", True)
            for host in ("127.0.0.1", "127.8.9.1", "[::1]", "LOCALHOST", "0.0.0.0")
        ),
        (f"http://{socket.gethostname()}/", True),
        *(
            (f"https://{host}/v1", False)
            for host in ("judge", "192.0.2.1", "[2001:db8::1]", "localhost.example.org")
        ),
        ("not an address", False),
    ],
)
def test_addresses_of_this_machine(url: str, own: bool) -> None:
    assert is_own(url) == own


def test_all_addresses_of_this_machine_are_exempt_beside_the_users() -> None:
    assert without_proxy({}) == without_proxy({"HTTP_PROXY": "", "no_proxy": "a"}) == {}
    found = without_proxy({"HTTPS_PROXY": NOWHERE, "no_proxy": "a, b", "NO_PROXY": "b,c"})
    assert found["no_proxy"] == found["NO_PROXY"] == ",".join(["a", "b", "c", *own_addresses()])
    assert without_proxy({"http_proxy": NOWHERE, "no_proxy": "x,*"}) == {
        "no_proxy": "*",
        "NO_PROXY": "*",
    }
    assert without_proxy({"http_proxy": NOWHERE} | found)["no_proxy"] == found["no_proxy"]


def test_an_engine_is_asked_and_asks_without_the_proxy(
    tmp_path: Path, port: int, proxied: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/health", timeout=10)
    spec = EngineSpec(name="e", model_path=str(tmp_path))
    server = ServerProcess(spec, tmp_path / "log")
    server.port = port
    assert server._answers("/health", None, 10.0)
    for name, value in common_environment(spec, str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    assert requests.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200


def test_a_module_of_the_working_directory_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found where it hides nothing: reward functions import helpers from there."""
    for name in ("random", "token", "queue", "pyarrow"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('hides another')")
    (tmp_path / "loads.py").write_text("import random, token, queue, pyarrow, sys; sys.exit(7)")
    monkeypatch.chdir(tmp_path)
    process, lines = start_process("loads", tmp_path / "log")
    lines.socket.close()
    assert process.wait(60) == 7, (tmp_path / "log").read_text()
    assert import_path()[-1] == str(tmp_path)
    command = [
        sys.executable,
        "-c",
        "import random, subprocess, sys; subprocess.run([sys.executable, '-c', 'import token'])",
    ]
    found = subprocess.run(
        command, env=os.environ | surroundings.SAFE_PATH, capture_output=True, check=False
    )
    assert found.returncode == 0 and b"hides" not in found.stderr
