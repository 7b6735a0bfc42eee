"""What processes of a run find loaded: what their role needs, and nothing of another's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.process.children import state_of
from hybridflow.process.fork_client import fork
from hybridflow.trainer.preload import Preload
from tests.dist.harness.children import start_child

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
import torch
wanted = ("torch", "ray", "megatron.core", "sglang", "transformers", "hybridflow.mcore.cpu_compat")
names = [name for name in wanted if name in sys.modules]
print(json.dumps({"modules": names, "threads": torch.get_num_threads()}))
"""


def test_a_role_finds_its_own_libraries_loaded_and_no_others(tmp_path: Path) -> None:
    script = tmp_path / "loaded.py"
    found = {}
    script.write_text(SCRIPT)
    with Preload(load_config("tiny-moe-grpo"), with_engines=True) as preload:
        for number, kind in enumerate(("torch", "ranks", "engines"), 1):
            out = tmp_path / kind
            with open(out, "wb") as file, open(os.devnull, "rb") as nothing:
                files = (nothing.fileno(), file.fileno(), 2)
                env = {**os.environ, "OMP_NUM_THREADS": str(number)}
                assert fork(preload.name(kind), [str(script)], env, files).wait(120) == 0
            found[kind] = json.loads(out.read_text().splitlines()[-1])
    assert found["torch"] == {"modules": ["torch"], "threads": 1}
    assert found["ranks"] == {
        "modules": ["torch", "megatron.core", "hybridflow.mcore.cpu_compat"],
        "threads": 2,
    }
    assert found["engines"] == {"modules": ["torch", "sglang", "transformers"], "threads": 3}


DRIVER = """
import os, sys, time
from hybridflow.config.load import load_config
from hybridflow.engines import guard
from hybridflow.process.fork_client import fork
from hybridflow.trainer.preload import Preload
sleeper, files = ["-m", "tests.unit.process.sleeper"], (0, 1, 2)
preload = Preload(load_config("tiny-moe-grpo"), with_engines=False)
rank = fork(preload.name("ranks"), sleeper, os.environ, files)
engine = [guard.__file__, str(os.getpid()), "0", sys.argv[1], "--", *sleeper]
leader = fork(preload.name("torch"), engine, os.environ, files, leader=True)
while not open(f"/proc/{leader.pid}/task/{leader.pid}/children").read():  # the guard has started its server
    time.sleep(0.02)
print(rank.pid, leader.pid, preload._process.pid, flush=True)
if len(sys.argv) > 2:  # the engine's end alone
    leader.send_signal(int(sys.argv[2]))
    print(leader.wait(60), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="the driver is killed"),
        pytest.param(
            [str(int(signal.SIGTERM))], id="the engine is stopped", marks=pytest.mark.full
        ),
    ],
)
def test_nothing_is_left_of_forks(tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # a fork finds the sleeper where its server would
    driver = start_child(
        [sys.executable, "-c", DRIVER, folder, *words], env=env, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    rank, guard, server = map(int, driver.stdout.readline().split())
    if words:
        # what the guard did to its server
        assert int(driver.stdout.readline()) == 128 + signal.SIGKILL
    assert state_of(rank) not in ("", "Z")
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 60
    while any(state_of(pid) not in ("", "Z") for pid in (rank, guard, server)):
        assert time.monotonic() < deadline, {pid: state_of(pid) for pid in (rank, guard, server)}
        time.sleep(0.05)
    assert not folder.exists()  # the guard has cleared up
