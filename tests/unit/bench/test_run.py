"""A measurement that takes too long ends with everything that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.bench.measurements import flows
from hybridflow.bench.measurements.base import Place, find
from hybridflow.bench.result import Metric
from hybridflow.bench.run import finish
from hybridflow.process.children import is_running


def test_what_a_late_measurement_has_started_ends_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with (tmp_path / "log").open("wb") as log, pytest.raises(subprocess.TimeoutExpired):
        finish(["sh", "-c", f"sleep 300 & echo $$ $! > {pids}; wait"], os.environ, log, 2.0)
    started = (
        pids.read_text().split() if pids.exists() else []
    )  # on a machine that did not run it for two seconds
    deadline = time.monotonic() + 60
    while alive := [pid for pid in map(int, started) if is_running(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


DISK = """
import os, sys, time
from pathlib import Path
from hybridflow.bench.measurements.base import Place
from hybridflow.bench.measurements.disk import disk
folder = Path(sys.argv[1])
timed = next(iter(disk(Place("", ("",), folder, folder))))
for call in timed.sides().values():
    call()
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_killed_measurement_of_disks_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    words = [sys.executable, "-c", DISK, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid
        process.kill()
    left = {name for name in os.listdir("/dev/shm") if str(process.pid) in name}
    assert left - before == set()


def test_the_status_and_the_words_of_a_measurement_are_kept(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert finish(["sh", "-c", "echo said; exit 3"], os.environ, log, 60.0) == 3
    assert (tmp_path / "log").read_bytes() == b"said\n"


@pytest.mark.slow
def test_following_a_flow_is_compared_with_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "STEPS", 2)
    found = list(find("flows").measure(Place("", ("",), tmp_path, tmp_path), []))
    assert [one.name for one in found if isinstance(one, Metric)] == [
        "flows/grpo adds to a step",
        "flows/ppo adds to a step",
    ]
    for one in found:
        assert isinstance(one, Metric) and one.limit is not None and one.limit.value == 5.0
        assert one.unit == "ms" and len(one.rounds) == flows.ROUNDS
    spans = (tmp_path / "ppo.jsonl").read_text()
    assert '"update_critic"' in spans and '"update_actor"' in spans and '"values"' in spans
