"""The process that runs `hybridflow train` in a job: how it ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.launch import driver
from hybridflow.launch.driver import STOPPED, Driver, command

HEAD = "127.0.0.1:1"
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a job's first start; the driver's program sleeps until a signal ends it."""
    program = tmp_path / "program"
    program.write_text("#!/bin/bash\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(driver.sys, "executable", str(program))
    (tmp_path / "restart-0").mkdir()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield tmp_path / "restart-0"
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_start_ends_itself_when_the_job_has_a_later_one(folder: Path) -> None:
    (folder.parent / "restart-1").mkdir()
    assert Driver(folder, 600.0).run(["train"], HEAD) == 128 + signal.SIGTERM


def test_a_start_that_was_asked_to_stop_counts_as_stopped_however_it_ends(folder: Path) -> None:
    asked = Driver(folder, 0.0)
    asked.ask()
    assert asked.run(["train"], HEAD) == STOPPED


def test_a_program_of_the_users_gets_its_own_words_alone() -> None:
    assert command(["program", "/mine/train.py", "--lr", "1"], HEAD)[1:] == [
        "/mine/train.py",
        "--lr",
        "1",
    ]
    assert command(["train", "--config-name", "x"], HEAD)[-1] == f"cluster.address={HEAD}"
