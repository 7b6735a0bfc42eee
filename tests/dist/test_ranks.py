"""Ranks are forks of a process that has loaded much: each must still be what a new interpreter is,
and none may outlive the tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.dist.harness.ranks import NOTHING, ROOT, TORCH, run_ranks

pytestmark = pytest.mark.slow


def test_a_rank_is_like_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for value in ("one", "two", "two"):
        monkeypatch.setenv("OF_THE_TEST", value)
        runs.append(run_ranks(4, "tests.dist.cases.rank:described", loaded=NOTHING))
        for rank, found in enumerate(runs[-1]):
            expected = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "4",
                "OMP_NUM_THREADS": "1",
                "OF_THE_TEST": value,
            }
            assert found["environment"] == expected and found["inherited"]
            assert (found["folder"], found["leads_its_session"], found["threads"]) == (
                str(ROOT),
                True,
                1,
            )
            assert [
                name
                for name in found["files"]
                if not name.endswith((f"/{rank}.out", f"/{rank}.err"))
            ] == ["/dev/null"]
            assert found["loaded"] == []
    # strings hash alike in forks of one process: neighbours of a mesh, whose numbers differ by a
    # power of two, are none
    hashes = [found["hash"] for found in runs[2]]
    assert not {hashes[0], hashes[3]} & {hashes[1], hashes[2]}
    assert len({found["random"] for run in runs for found in run}) == 12
    code = (
        "import json, tests.dist.cases.rank as c; f = c.described(); "
        "print(json.dumps([f['signals'], f['blocked']]))"
    )
    new = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RANK": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(new.stdout) == [runs[0][0]["signals"], runs[0][0]["blocked"]]


def test_loading_megatron_beforehand_changes_nothing_that_a_rank_can_tell() -> None:
    """Against a rank that loads it itself."""
    forks = [rank for _ in range(2) for rank in run_ranks(4, "tests.dist.cases.rank:of_megatron")]
    [own] = run_ranks(1, "tests.dist.cases.rank:of_megatron", loaded=NOTHING)
    for fork in forks:
        for name in (
            "threads_of_torch",
            "groups",
            "default",
            "compiles",
            "signals",
            "blocked",
            "threads",
        ):
            assert fork[name] == own[name], name
        assert not fork["groups"]
    for generator in ("random", "numpy", "torch"):
        assert len({fork[generator] for fork in forks}) == len(forks)
    [without] = run_ranks(1, "tests.dist.cases.rank:described", loaded=TORCH)
    # ranks that do without Megatron find nothing of it
    assert without["loaded"] == ["numpy", "torch"]


def test_every_failure_is_told_with_what_the_rank_said_and_nothing_is_left(tmp_path: Path) -> None:
    # starts the server: the deadline is the ranks'
    run_ranks(1, "tests.dist.cases.rank:described", loaded=NOTHING)
    with pytest.raises(AssertionError) as caught:
        run_ranks(
            4, "tests.dist.cases.rank:mixed", timeout_s=8, loaded=NOTHING, folder=str(tmp_path)
        )
    said = str(caught.value)
    assert re.findall(r"^rank (\d) (.*)$", said, re.M) == [
        ("1", "exited with 1"),
        ("2", "exited with -9"),
        ("3", "did not end within 8 s"),
    ]
    assert "ValueError: what went wrong" in said
    assert _all_ended([int((tmp_path / "child").read_text())])
    assert run_ranks(1, "tests.dist.cases.rank:mixed", loaded=NOTHING, folder=str(tmp_path)) == [
        "fine"
    ]


def test_ranks_die_with_the_tests(tmp_path: Path) -> None:
    code = (
        "from tests.dist.harness.ranks import run_ranks; run_ranks(2, "
        f"'tests.dist.cases.rank:stay', loaded=(), folder={str(tmp_path)!r})"
    )
    tests = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 240
    while len(list(tmp_path.iterdir())) < 2 or not all(
        file.read_text() for file in tmp_path.iterdir()
    ):
        assert tests.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(set(pids)) == 4 and all(map(psutil.pid_exists, pids))  # two ranks and their servers
    tests.send_signal(signal.SIGKILL)
    tests.wait()
    assert _all_ended(pids)


def _all_ended(pids: list[int], within_s: float = 60) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
