"""The lock of a run folder: who has it, and what others can do with it."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import platform
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from hybridflow.config.schema import RunConfig, TrainerConfig
from hybridflow.errors import ConfigError
from hybridflow.observe.progress import Progress
from hybridflow.saving.store import Checkpoint, CheckpointStore
from hybridflow.trainer import folder as folders
from hybridflow.trainer.folder import exclusive, make_room


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "_PATIENCE_S", 0.0)
    return tmp_path / "run"


def lock_of(folder: Path) -> Path:
    return folder.parent / ".run.lock"


def _hold(folder: Path, has: Event, go: Event) -> None:
    with exclusive(folder):
        has.set()
        go.wait(60)


def test_the_second_process_is_told_who_has_it_and_gets_it_afterwards(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    has = context.Event()
    go = context.Event()
    first = context.Process(target=_hold, args=(folder, has, go))
    first.start()
    assert has.wait(60) and first.pid
    with (
        pytest.raises(
            ConfigError, match=rf"process {first.pid} on {platform.node()} since 2\d\d\d-"
        ),
        exclusive(folder),
    ):
        raise AssertionError("two have it")
    first.kill()
    first.join()
    with exclusive(folder):
        assert (
            str(os.getpid()) in lock_of(folder).read_text()
            and str(first.pid) not in lock_of(folder).read_text()
        )
    with exclusive(folder):  # an end in order leaves it free
        assert lock_of(folder).stat().st_size == 256


def test_the_next_process_waits_for_one_that_ends_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job that is submitted right after `scancel`: the first is writing its checkpoint, then
    ends."""
    monkeypatch.setattr(folders, "_PATIENCE_S", 60.0)
    context = multiprocessing.get_context("fork")
    has = context.Event()
    go = context.Event()
    first = context.Process(target=_hold, args=(folder, has, go))
    first.start()
    assert has.wait(60)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        go.set()

    with exclusive(folder, say):
        assert str(os.getpid()) in lock_of(folder).read_text()
    first.join()
    [line] = said
    assert (
        f"process {first.pid} on" in line and str(folder) in line and "waiting up to 60 s" in line
    )


def test_a_lock_is_of_this_user_alone_also_one_of_an_earlier_version(folder: Path) -> None:
    lock_of(folder).touch(0o644)
    lock_of(folder).chmod(0o666)
    with exclusive(folder):
        assert lock_of(folder).stat().st_mode & 0o777 == 0o600


def test_a_stranger_that_holds_an_old_lock_is_said_with_the_file_to_remove(folder: Path) -> None:
    lock_of(folder).touch(0o644)
    with lock_of(folder).open() as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        with (
            pytest.raises(
                ConfigError, match=rf"another process holds the lock: remove {lock_of(folder)}"
            ),
            exclusive(folder),
        ):
            raise AssertionError("two have it")
        lock_of(folder).unlink()
        with exclusive(folder):
            pass


@pytest.mark.parametrize(
    "plant", ["link", "hard link", "file of another content", "pipe", "folder", "hanging link"]
)
def test_nothing_planted_in_its_place_is_written(folder: Path, plant: str) -> None:
    mine = folder.parent / "thesis.tex"
    mine.write_text("two years of work")
    if plant == "link":
        lock_of(folder).symlink_to(mine)
    elif plant == "hard link":
        lock_of(folder).hardlink_to(mine)
    elif plant == "file of another content":
        lock_of(folder).write_text("two years of work")
    elif plant == "pipe":
        os.mkfifo(lock_of(folder))
    elif plant == "folder":
        lock_of(folder).mkdir()
    else:
        lock_of(folder).symlink_to(folder.parent / "new")
    with (
        pytest.raises(ConfigError, match=rf"run folder's lock {lock_of(folder)} .*Remove it"),
        exclusive(folder),
    ):
        raise AssertionError("it was taken")
    assert mine.read_text() == "two years of work"
    assert not (folder.parent / "new").exists()
    assert plant != "file of another content" or lock_of(folder).read_text() == "two years of work"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_the_file_of_another_user_is_refused_by_number(folder: Path) -> None:
    lock_of(folder).touch(0o666)
    os.chown(lock_of(folder), 65534, 65534)
    with (
        pytest.raises(ConfigError, match="belongs to the user with id 65534"),
        exclusive(folder),
    ):
        raise AssertionError("it was taken")


@pytest.mark.parametrize(("now", "goes_on"), [(2, False), (3, True)])
def test_a_finished_run_of_fewer_epochs_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, now: int, goes_on: bool
) -> None:
    folder.mkdir()
    monkeypatch.setattr(CheckpointStore, "latest", lambda _: Checkpoint(folder, "rl", 5, {}))
    (folder / "summary.json").write_text("{}")
    (folder / "config.yaml").write_text("trainer: {total_epochs: 2, total_steps: null}\n")
    make_room(
        RunConfig(trainer=TrainerConfig(total_epochs=now)),
        folder,
        None,
        Progress(0, "", enabled=False),
    )
    assert folder.exists() == goes_on and folder.with_name("run.1").exists() != goes_on
