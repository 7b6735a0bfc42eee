"""Ranks killed at every moment of an asynchronous save: the checkpoint in force is whole, and the
next world loads it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.saving.manifest import Manifest, problems_of
from tests.dist.harness.ranks import free_port

pytestmark = pytest.mark.slow
# what is seen in the folder when the kill comes (pieces of the paths of a save, in the order of
# their appearance), or seconds of delay
SEEN = (
    *(
        "_{}.partial",
        "_{}.partial/driver.json.tmp",
        "_{}.partial/driver.json",
        "_{}.partial/policy",
        "_{}.partial/policy/rank_0.bin",
    ),
    *(
        "_{}.partial/policy/rank_1.bin",
        "_{}.partial/policy/index.json.tmp",
        "_{}.partial/policy/index.json",
    ),
    *("_{}.partial/policy/manifest.json.tmp", "_{}.partial/policy/manifest.json", "_{}"),
)
DELAYS = (0.0, 0.01, 0.02, 0.035, 0.05, 0.07, 0.09, 0.12, 0.16, 0.2)
BOTH = (0, 1)
FIRST = (0,)
SECOND = (1,)


class World:
    """The warm process, and one pair of ranks at a time."""

    def __init__(self, folder: Path) -> None:
        root = Path(__file__).parents[2]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(root),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.folder = folder
        self.log = (folder.parent / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.harness.kill_world"],
            **{
                "env": env,
                "cwd": root,
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": self.log,
                "text": True,
            },
        )
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(json.loads(line))

    def start(self) -> tuple[list[int], int]:
        """(process ids, the step of the checkpoint that both ranks have loaded)."""
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"port": free_port(), "folder": str(self.folder)}) + "\n"
        )
        self.process.stdin.flush()
        lines = [self.lines.get(timeout=240) for _ in range(3)]
        assert all("ends" not in line for line in lines), f"a rank ended: {self.said()}"
        [pids] = [line["pids"] for line in lines if "pids" in line]
        steps = {line["loaded"] for line in lines if "loaded" in line}
        assert len(steps) == 1
        return pids, steps.pop()

    def ends(self) -> list[int]:
        """How the ranks ended, when both have."""
        ends: list[int] = self.lines.get(timeout=240)["ends"]
        return ends

    def said(self) -> str:
        return Path(self.log.name).read_text()[-3000:]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    folder = tmp_path / "killed" / "checkpoints"
    folder.mkdir(parents=True)
    world = World(folder)
    yield world
    world.process.kill()
    world.process.wait()


def step_in_force(folder: Path) -> int:
    """The step of the checkpoint in force, whose every byte is what its manifest says."""
    chosen = folder / json.loads((folder / "latest.json").read_text())["folder"]
    manifest = Manifest.read(chosen / "policy")
    assert problems_of(chosen / "policy", manifest) == []
    driver = json.loads((chosen / "driver.json").read_text())
    assert manifest.step == driver["step"] == driver["state"]["step"]
    return manifest.step


def latest(folder: Path) -> int:
    """The step that latest.json names, while the ranks go on."""
    return int(json.loads((folder / "latest.json").read_text())["folder"].split("_")[-1])


def wait_until(what: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.0005)


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.exists() else set()


# of a save that both ranks are killed in, and of one that a rank is
SEEN_BY_BOTH = [(seen, BOTH) for seen in SEEN]
OF_ONE_RANK = [(SEEN[3], FIRST), (SEEN[4], SECOND), (SEEN[9], SECOND)]
LATER = [(delay, BOTH) for delay in DELAYS]


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([*SEEN_BY_BOTH, *OF_ONE_RANK], id="seen"),
        pytest.param([*SEEN_BY_BOTH, *LATER, *OF_ONE_RANK], id="all", marks=pytest.mark.full),
    ],
)
def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(
    world: World, points: list[tuple[str | float, tuple[int, ...]]]
) -> None:
    """Each world begins by loading, bit for bit, what the one before left. A save takes about
    0.1 s."""
    pids, loaded = world.start()
    assert loaded == 0
    wait_until(lambda: "latest.json" in names(world.folder))
    interrupted = 0
    for point, ranks in points:
        before = latest(world.folder)
        target = before + 3  # a save that begins under our eyes
        if isinstance(point, str):
            seen = world.folder / f"global_step{point.format(target)}"
            whole = world.folder / f"global_step_{target}"
            wait_until(lambda seen=seen, whole=whole: os.path.lexists(seen) or whole.exists())
        else:
            began = world.folder / f"global_step_{target}.partial"
            wait_until(lambda began=began: began.exists())
            time.sleep(point)
        for rank in ranks:
            os.kill(pids[rank], signal.SIGKILL)
        ends = world.ends()
        assert all(ends[rank] == -signal.SIGKILL for rank in ranks), (point, ends)
        if ranks != BOTH:  # the other rank ends by itself, saying so
            assert ends[1 - ranks[0]] == 1 and "another rank has ended" in world.said(), (
                world.said()
            )
        interrupted += bool(list(world.folder.glob("*.partial")))
        left = step_in_force(world.folder)
        assert left >= before
        pids, loaded = world.start()
        assert loaded == left
    assert interrupted >= 10, "most kills must have met a save"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    world.ends()
