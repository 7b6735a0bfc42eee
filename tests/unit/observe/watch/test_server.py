"""The server of `hybridflow watch` over run folders: live, whole, hostile, and closed to others."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hybridflow.errors import ConfigError
from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.tracker import Tracker
from hybridflow.observe.watch.pages import Pages, Watched
from hybridflow.observe.watch.server import WatchServer
from tests.security.foreign import HOSTILE, SECRET, run_folder

FEW = ("pipes", "sparse", "links", "steering", "deep")
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ATTACK = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
PAGES = (
    "",
    "rollouts",
    "rollouts?text=script&order=best+score",
    "group?kind=rollouts&step=1&uid=0",
    "sample?kind=rollouts&step=1&row=0",
    "compare",
    "answers",
    "answers?kind=rollouts&step=1&other_step=2&show=all",
)


class Shape(HTMLParser):
    """Collects tags, event handlers and addresses, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0
        self.handlers: list[str] = []
        self.addresses: list[str] = []
        self.unlabelled: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.scripts += tag == "script"
        self.handlers += [name for name in values if name.startswith("on")]
        self.addresses += [
            values[name] or "" for name in ("src", "href", "action") if name in values
        ]
        if tag in ("input", "select") and "label" not in self.open:
            self.unlabelled.append(str(values))
        if tag not in ("meta", "link", "input", "br", "col", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.open)


def whole_run(run: Path, text: str = "12+34=") -> Path:
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps({"name": text, "trainer": {"total_steps": 9}}))
    with Tracker(run, ("jsonl",)) as tracker:
        for step in range(1, 9):
            tracker.log(
                step,
                {"critic/score/mean": step / 9, "critic/unsolved_groups": 0.9, f"flow/{text}": 1},
            )
    (run / "changes.jsonl").write_text(
        json.dumps({"phase": "rl", "step": 4, "changes": [f"actor.optim.lr: 1 -> {text}"]}) + "\n"
    )
    for step in (1, 2):
        rows = {
            "uid": [0, 0, 1, 1],
            "prompt_text": [text] * 4,
            "response_text": [f"{text} {step}"] * 4,
            "ground_truth": [text] * 4,
            "score": [0.0, 1.0, 0.0, 0.0],
            "reward_extra": [json.dumps({text: text})] * 4,
            "agent_failure": [text] * 4,
            "messages": [json.dumps([{"role": text, "content": text}])] * 4,
            "data_source": [text] * 4,
            "finish_reason": [text] * 4,
        }
        dump_rollouts(dump_path(run / "rollouts", step), rows)
    return run


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a server of the run, compared with itself."""
    watched = Watched.of(run)
    list(watched.index.refresh())
    server = WatchServer(Pages(watched, watched), 0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.address
    finally:
        server.close()
        thread.join(10)
        assert not thread.is_alive()


def asked(
    address: str, page: str = "", host: str | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 0, timeout=60)
    connection.request("GET", parts.path + page, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def shape(text: str) -> Shape:
    found = Shape()
    found.feed(text)
    assert found.open == []
    return found


def test_every_page_of_a_run_is_whole_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    with served(whole_run(tmp_path / "run")) as address:
        todo = ["./", *PAGES[1:]]
        seen: set[str] = set()
        while todo:
            page = todo.pop()
            if page in seen or page.startswith(("#", "data:")):
                continue
            seen.add(page)
            status, text, headers = asked(address, page.removeprefix("./"))
            assert status == 200, page
            found = shape(text)
            assert found.scripts == 1 and not found.unlabelled
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            assert headers["Referrer-Policy"] == "no-referrer"
            todo += found.addresses
        assert len(seen) > 15 and any(page.startswith("prompt?") for page in seen)
        first = asked(address)[1]
    assert "Groups all failed" in first and "For 90% of the prompts" in first
    assert "after rl step 4: actor.optim.lr: 1 -&gt; 12+34=" in first


def test_text_of_the_run_is_escaped_on_every_page(tmp_path: Path) -> None:
    with served(whole_run(tmp_path / "run", ATTACK)) as address:
        addresses = shape(asked(address, "rollouts")[1]).addresses
        over_steps = next(one for one in addresses if one.startswith("prompt?"))
        for page in (*PAGES, over_steps):
            status, text, _ = asked(address, page)
            found = shape(text)
            assert status == 200 and found.scripts == 1 and found.handlers == [], page
            assert all(not one.startswith(("http", "//", "javascript")) for one in found.addresses)
        for page in ("./", "rollouts"):
            live = json.loads(asked(address, f"live?page={page}&after=0")[1])
            assert live["sections"]
            for text in live["sections"].values():
                assert shape(text).scripts == 0


def test_only_who_has_the_token_and_asks_this_machine_gets_an_answer(tmp_path: Path) -> None:
    with served(whole_run(tmp_path / "run")) as address:
        assert asked(address)[0] == 200
        parts = urlsplit(address)
        token = parts.path.strip("/")
        base = f"http://{parts.netloc}/"
        assert len(token) >= 32
        for path in ("", token[:-1] + "/", "x" * 43 + "/", f"?token={token}", "%00/", "é/"):
            status, text, _ = asked(base + path.encode("ascii", "ignore").decode())
            assert status == 403 and "12+34" not in text and token not in text, path
        assert asked(address, host="elsewhere.example:80")[0] == 403  # a name that points here
        assert asked(address, "../../etc/passwd")[0] == 404
        for page in ("nothing", "sample?kind=rollouts&step=1&row=9", "group?kind=..&step=1&uid=0"):
            assert asked(address, page)[0] == 404
        with pytest.raises(ConfigError, match="cannot be used"):
            WatchServer(Pages(Watched.of(tmp_path)), parts.port or 0)
        assert socket.create_connection(("127.0.0.1", parts.port or 0), 5).close() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.full) for kind in HOSTILE]
)
def test_a_folder_of_somebody_else_is_shown_within_bounds(tmp_path: Path, kind: str) -> None:
    run = run_folder(tmp_path / "run")
    HOSTILE[kind](run)
    with served(run) as address:
        for page in PAGES:
            status, text, _ = asked(address, page)
            assert status in (200, 404) and SECRET not in text and not STEERING.search(text), page
            assert shape(text).scripts == 1
        note = json.loads(asked(address, "live?page=./&after=0")[1])["note"]
    assert note.startswith("live")


@pytest.mark.slow
def test_the_command_shows_a_new_step_and_ends_by_an_interrupt(
    tmp_path: Path,
) -> None:
    run = whole_run(tmp_path / "run")
    command = [sys.executable, "-m", "hybridflow", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        before = json.loads(asked(address, "live?page=./&after=0")[1])
        assert before["status"] == "step 8 of 9"
        with Tracker(run, ("jsonl",)) as tracker:
            tracker.log(9, {"critic/score/mean": 1.0})
        dump_rollouts(dump_path(run / "rollouts", 9), {"response_text": ["new"], "score": [1.0]})
        written = time.monotonic()
        while True:
            live = json.loads(asked(address, f"live?page=./&after={before['version']}")[1])
            found = asked(address, "rollouts?text=new")[1]
            if live["status"] == "step 9 of 9" and "rollouts 9" in found:
                break
            assert time.monotonic() < written + 30.0  # 1 s on an idle machine
            time.sleep(0.1)
        assert "charts" in live["sections"] and "settings" not in live["sections"]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stdout.read() == "stopped\n"
