"""Folders in places of all users that nobody else can enter or replace."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hybridflow.errors import ResourceError
from hybridflow.launch.__main__ import main
from hybridflow.process.private_folder import (
    ROOM_FOR_RAY,
    make_private_folder,
    parent_of_private,
    temporary_private_folder,
)


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_new_and_of_this_user_alone(parent: Path) -> None:
    made = [make_private_folder("a-") for _ in range(3)]
    assert len(set(made)) == 3 and {folder.parent for folder in made} == {parent}
    assert {folder.stat().st_mode & 0o777 for folder in made} == {0o700}


def test_a_long_tmpdir_is_left_for_tmp(parent: Path) -> None:
    made = make_private_folder("hf-ray-", ROOM_FOR_RAY)
    assert made.parent == Path("/tmp") and len(str(made)) + ROOM_FOR_RAY <= 107
    made.rmdir()


def test_the_longest_parent_still_leaves_sockets_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # bytes count
    for letter, length, fits in (("x", 47, True), ("x", 48, False), ("é", 40, False)):
        folder = tmp_path.parents[-2] / f"{letter * (length - len(str(tmp_path.parents[-2])) - 1)}"
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        try:
            assert parent_of_private(14, 45) == (folder if fits else Path("/tmp"))
        finally:
            folder.rmdir()


def test_a_place_where_others_could_replace_it_is_refused(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parent / "below").mkdir()
    parent.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "below"))
    with pytest.raises(
        ResourceError, match=f"{parent} is writable by every user and not sticky.*TMPDIR"
    ):
        make_private_folder("a-")
    parent.chmod(0o1777)
    assert make_private_folder("a-").is_dir()


def test_a_tmpdir_that_is_full_or_may_not_be_written_is_named(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(
        ResourceError, match=f"could not create a folder in {parent}: No space left.*TMPDIR"
    ):
        make_private_folder("a-")


def test_the_script_gets_a_folder_inside_of_the_private_one(
    parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["private-folder", "--prefix", "hf-cluster-20000-"]) == 0
    shown = Path(capsys.readouterr().out.strip())
    assert shown.name == "r" and not shown.exists()
    assert shown.parent.stat().st_mode & 0o777 == 0o700
    shown.parent.rmdir()


_HOLDER = """
import sys, time
from hybridflow.process.private_folder import temporary_private_folder
with temporary_private_folder("b-") as folder:
    (folder / "weights").mkdir()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    target = tmp_path / "not a temporary folder"
    target.mkdir()
    (tmp_path / "b-link").symlink_to(target)
    holders = []
    for _ in range(2):
        holders.append(
            subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True)
        )
    folders = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout]
    killed, alive = holders
    killed.kill()
    killed.wait(10)
    with temporary_private_folder("b-") as own:
        assert not folders[0].exists() and folders[1].is_dir() and target.is_dir()
        assert own.stat().st_mode & 0o077 == 0
    assert not own.exists()
    alive.kill()
    alive.wait(10)
