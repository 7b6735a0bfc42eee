"""Killed at every batch boundary of two epochs, and at every moment around a checkpoint: the
prompts are those of the uninterrupted run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.unit.trainer.killed_runs import IN_A_SAVE, IN_A_STEP, ROWS, STEPS, Kill

pytestmark = pytest.mark.slow  # about 100 short processes that write checkpoints
ROOT = Path(__file__).resolve().parents[3]
ALL_STEPS = range(1, STEPS + 1)
KILLED = "test_killed_runs_take_the_prompts_of_the_uninterrupted_one"


def is_saved(step: int, every: int) -> bool:
    return step == STEPS or (every > 0 and step % every == 0)


def moments(every: int) -> list[Kill]:
    """Every moment at which a run can be killed, in order."""
    return [
        (step, name)
        for step in ALL_STEPS
        for name in (*IN_A_STEP, *(IN_A_SAVE if is_saved(step, every) else ()))
    ]


def scenarios() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {"uninterrupted": scenario(1, [])}
    for every in (1, 2):
        made |= {
            f"{every} {step} {name}": scenario(every, [(step, name)])
            for step, name in moments(every)
        }
    # a save in the background may or may not be done when the process is killed
    for step, name in moments(0):
        made[f"background {step} {name}"] = scenario(1, [(step, name)], background=True)
    return made | {"killed at every moment in turn": scenario(1, moments(1))}


def scenario(every: int, kills: list[Kill], background: bool = False) -> dict[str, Any]:
    return {"every": every, "background": background, "kills": kills}


# the first one, the one whose batch lies across the epochs, and the last one
IN_MAKE_TEST = (1, 3, 5)


def is_full(name: str) -> bool:
    """True where only test-full runs a scenario: the steps between, whose every moment is one of
    those in turn, and with a checkpoint every two steps all but one moment of a step."""
    every, _, at = name.partition(" ")
    if not at[:1].isdigit():
        return False
    step, _, moment = at.partition(" ")
    return int(step) not in IN_MAKE_TEST or (every == "2" and moment != "trained")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of all scenarios of this session."""
    folder = tmp_path_factory.mktemp("killed")
    asked = {item.name for item in request.session.items}
    chosen = {
        name: one
        for name, one in scenarios().items()
        if not is_full(name) or f"{KILLED}[{name}]" in asked
    }
    (folder / "scenarios.json").write_text(json.dumps(chosen))
    command = [
        sys.executable,
        "-m",
        "tests.unit.trainer.killed_runs",
        str(folder),
        str(folder / "scenarios.json"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def ledger(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "ledger.jsonl"))


def checkpoint_after(kills: list[Kill], every: int) -> int:
    """The step whose checkpoint is in force after these kills: a save counts once latest.json
    points to it; before any has come so far, as soon as it has its name."""
    pointed_to = named = 0
    for step, name in kills:
        first = (pointed_to or named) + 1
        pointed_to = max(
            (saved for saved in range(first, step) if is_saved(saved, every)), default=pointed_to
        )
        if name == "not pointed to yet":
            named = step
    return pointed_to or named


def test_the_uninterrupted_run_takes_every_row_once_an_epoch(runs: Path) -> None:
    taken = [row for entry in ledger(runs / "uninterrupted") for row in entry["prompts"]]
    assert sorted(taken[:ROWS]) == sorted(taken[ROWS:]) == list(range(ROWS))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if is_full(name) else [])
        for name in scenarios()
        if name != "uninterrupted"
    ],
)
def test_killed_runs_take_the_prompts_of_the_uninterrupted_one(runs: Path, name: str) -> None:
    folder = runs / name
    planned = scenarios()[name]
    kills = planned["kills"]
    every = planned["every"]
    wanted = {entry["step"]: entry["prompts"] for entry in ledger(runs / "uninterrupted")}
    assert json.loads((folder / "attempts.json").read_text()) == [
        *[-signal.SIGKILL] * len(kills),
        0,
    ]
    for attempt in range(len(kills) + 1):
        entries = [entry for entry in ledger(folder) if entry["attempt"] == attempt]
        steps = [entry["step"] for entry in entries]
        first = checkpoint_after(kills[:attempt], every) + 1
        last = kills[attempt][0] if attempt < len(kills) else STEPS
        if planned["background"] and attempt:
            assert steps[0] in (first - 1, first), f"attempt {attempt} resumed elsewhere"
            first = steps[0]
        assert steps == list(range(first, last + 1)), (
            f"attempt {attempt} resumed elsewhere, skipped a step or did one twice"
        )
        assert all(entry["prompts"] == wanted[entry["step"]] for entry in entries), (
            f"attempt {attempt} took other prompts"
        )
    records = list(read_jsonl(folder / "run" / "metrics.jsonl"))
    assert [record["step"] for record in records if record["phase"] == "train"] == list(ALL_STEPS)
    assert [record["step"] for record in records if record["phase"] == "val"] == [0, STEPS]
    for step in ALL_STEPS:
        rows = read_rollouts(folder / "run" / "rollouts" / f"step_{step:06d}.parquet")
        assert [json.loads(row["extra_info"])["index"] for row in rows][::2] == wanted[step]
