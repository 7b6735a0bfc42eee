"""Commands on a finished run that are killed and given again: `replay`, `checkpoint export`, `report`."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.runs import Run
from tests.faults.campaign import PATIENCE_S, Trial
from tests.faults.faults import KILL
from tests.faults.shapes import STEPS

EACH = 4  # kills of each command


@dataclass(frozen=True)
class _Command:
    """A command, and what it writes.

    Attributes:
        words: of its command line, for a run folder and a new folder.
        result: what must be the same after a kill.
    """

    words: Callable[[Path, Path], list[str]]
    result: Callable[[Path, Path], object]


def _digests(folder: Path, pattern: str) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob(pattern)):
        name = path.relative_to(folder)
        # written by the commands
        if path.is_file() and name.parts[0] not in ("replay", "report.html"):
            found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


_COMMANDS = {
    "replay": _Command(
        lambda run, new: [
            *("replay", str(run), str(STEPS), "--run-code", "trainer.loggers=[jsonl]")
        ],
        lambda run, new: "the exit status says whether all values are those of the run",
    ),
    "checkpoint export": _Command(
        lambda run, new: ["checkpoint", "export", str(run), str(new)],
        lambda run, new: _digests(new, "*.safetensors"),
    ),
    "report": _Command(
        lambda run, new: ["report", str(run)],
        lambda run, new: (run / "report.html").exists(),
    ),
}


def play(finished: Path, work: Path, seed: int) -> list[Trial]:
    """A trial for each kill. `finished`: the folder of a run that has ended; `work`: a new one."""
    chance = random.Random(seed)
    trials = []
    for name, command in _COMMANDS.items():
        run = work / name.replace(" ", "-") / "run"
        shutil.copytree(finished, run)
        before = _digests(run, "*")
        began = time.monotonic()
        expected, problem = _whole(command, run, work / f"{run.parent.name}-whole")
        took = time.monotonic() - began
        assert not problem, problem
        for number in range(EACH):
            part = chance.random()
            trial = Trial("one process", seed, f"{KILL} {name} at {part:.2f}", KILL, name, name, 0)
            new = work / f"{run.parent.name}-{number}"
            with Run(work / "output", *command.words(run, new)) as killed:
                time.sleep(part * took)
                killed._look()
                os.kill(killed.process.pid, signal.SIGKILL)
                killed.process.wait(10)
                if left := killed.left_behind(within_s=25):
                    trial.faults.append(f"left behind: {left}")
            trial.ended = True
            began = time.monotonic()
            found, problem = _whole(command, run, new)
            trial.seconds = time.monotonic() - began
            if problem:
                trial.faults.append(problem)
            elif found != expected:
                trial.faults.append(f"{name}: another result than that of a command left alone")
            after = _digests(run, "*")
            if changed := [key for key in before if after.get(key) != before[key]]:
                trial.faults.append(f"files of the run have changed: {changed}")
            trials.append(trial)
    return trials


def _whole(command: _Command, run: Path, new: Path) -> tuple[object, str]:
    """What the command makes when it is left alone, or what is wrong with its end."""
    with Run(new.parent / "output", *command.words(run, new)) as left_alone:
        code = left_alone.end(PATIENCE_S)
        if code != 0:
            return None, f"ended with {code}: {(left_alone.out + left_alone.err)[-600:]}"
    return command.result(run, new), ""
