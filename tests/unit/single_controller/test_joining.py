"""Which cluster `cluster.address=auto` means, and who is sent the token there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hybridflow.errors import ResourceError
from hybridflow.single_controller.joining import find_address, require_listener

pytestmark = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can start processes of other users"
)
# nobody else of this machine: its own clusters do not count
ME = 61234
STRANGER = 61235

Start = Callable[[int, str], object]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Start what looks like a raylet of a user; Ray's notes are below `tmp_path`."""
    monkeypatch.setattr(os, "getuid", lambda: ME)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ExitStack() as stack:

        def raylet(user: int, address: str) -> None:
            words = ["/ray/core/raylet", "-c", "echo; read line", f"--gcs-address={address}"]
            process = stack.enter_context(
                subprocess.Popen(
                    words,
                    executable="/bin/sh",
                    user=user,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd="/",
                )
            )
            assert process.stdout is not None and process.stdout.readline()

        yield raylet


def note(folder: Path, user: int, address: str) -> Path:
    """Ray's note of what was started last, in a folder of that user."""
    (folder / "ray").mkdir()
    file = folder / "ray" / "ray_current_cluster"
    file.write_text(address)
    for path in (file, file.parent):
        os.chown(path, user, user)
    return file


def test_auto_is_the_ray_of_this_user_whatever_others_run(start: Start) -> None:
    start(STRANGER, "10.0.0.9:1")
    with pytest.raises(
        ResourceError,
        match=r"you run no Ray cluster on this machine; start one .*cluster\.address=HOST",
    ):
        find_address("auto")
    start(ME, "10.0.0.1:20000")
    start(ME, "10.0.0.1:20000")  # another of its nodes
    assert find_address("auto") == "10.0.0.1:20000"


def test_several_are_told_apart_by_the_note_or_named(start: Start, tmp_path: Path) -> None:
    start(ME, "10.0.0.1:20000")
    start(ME, "10.0.0.2:20000")
    with pytest.raises(
        ResourceError,
        match=r"several .*\(10\.0\.0\.1:20000, 10\.0\.0\.2:20000\); set cluster\.address",
    ):
        find_address("auto")
    note(tmp_path, ME, "10.0.0.2:20000\n")
    assert find_address("auto") == "10.0.0.2:20000"


@pytest.mark.parametrize("planted", ["note", "folder", "link"])
def test_a_note_of_somebody_else_is_refused(start: Start, tmp_path: Path, planted: str) -> None:
    file = note(tmp_path, ME, "10.0.0.9:1")
    assert find_address("auto") == "10.0.0.9:1"
    if planted == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        os.lchown(file, ME, ME)
    else:
        os.chown(file if planted == "note" else file.parent, STRANGER, STRANGER)
    who = "is a link" if planted == "link" else f"belongs to user {STRANGER}"
    with pytest.raises(
        ResourceError, match=rf"{tmp_path}/ray.* {who}.*token.*cluster\.address=HOST:PORT"
    ):
        find_address("auto")


def test_what_was_named_is_taken_as_it_is(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(ME, "10.0.0.1:20000")
    assert find_address("10.0.0.5:7") == "10.0.0.5:7"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.6:8")  # as `ray job submit` sets it
    assert find_address("auto") == "10.0.0.6:8"
    assert find_address("10.0.0.5:7") == "10.0.0.5:7"


LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("user", [0, STRANGER])
def test_no_token_is_sent_to_another_user_who_listens_where_the_head_was(user: int) -> None:
    command = [sys.executable, "-c", LISTEN, str(user)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as listener:
        assert listener.stdout is not None
        address = f"127.0.0.1:{int(listener.stdout.readline())}"
        if user:
            with pytest.raises(
                ResourceError, match=rf"the listener at {address} belongs to user {STRANGER}"
            ):
                require_listener(address, 5.0)
        else:
            require_listener(address, 5.0)
        listener.communicate("\n")
    with pytest.raises(ResourceError, match=f"cannot join the Ray cluster at {address}"):
        require_listener(address, 0.5)
