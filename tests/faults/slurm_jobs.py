"""A job on a real Slurm, over two nodes, whose processes are killed in seven of its eight steps."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.faults import oracle
from tests.faults.campaign import PATIENCE_S, Moments, Trial, is_moment
from tests.faults.faults import KILL, PHASES, STARTING, Fault, possible
from tests.faults.shapes import SLURM, STEPS, words_of
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import (
    PATIENT,
    Jobs,
    agent_of_second_node,
    engine_of,
    find,
    left_behind,
    rank_on,
)

_SECOND = "127.0.0.12"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_VICTIMS: dict[str, Callable[[str], psutil.Process]] = {
    "rank of n2": lambda job: rank_on(job, _SECOND),
    "engine scheduler": engine_of,
    "raylet of n2": lambda job: find(job, "raylet/raylet", _SECOND),
    "gcs": lambda job: find(job, "gcs_server"),
    "agent of n2": agent_of_second_node,
    "driver": lambda job: find(job, "hybridflow.cli.main train"),
}


def draw(seed: int) -> list[Fault]:
    """A kill in the start and in every step but the last."""
    chance = random.Random(f"{SLURM} {seed}")
    places = [(chance.choice(STARTING[1:]), 0)]
    places += [(possible(chance.choice(PHASES), step), step) for step in range(1, STEPS)]
    victims = list(_VICTIMS)
    return [Fault(KILL, moment, step, 0.0, (chance.choice(victims),)) for moment, step in places]


def play(seeds: Sequence[int], folder: Path) -> list[Trial]:
    """A job for each seed, and one that nobody disturbs."""
    trials = []
    with SlurmCluster(["n1", "n2", "n3"]) as cluster:
        jobs = Jobs(cluster, folder, [])
        reference = folder / "undisturbed"
        _Job(jobs, reference, [], 0).play()
        for seed in seeds:
            at = folder / f"seed-{seed}"
            of_seed = _Job(jobs, at, draw(seed), seed).play()
            of_seed[-1].faults += oracle.differences(at / "out" / "e2e", reference / "out" / "e2e")
            trials += of_seed
    return trials


class _Job:
    """A job that is disturbed until Slurm is done with it.

    Args:
        at: a new folder; the run's lies in it at out/e2e.
        todo: what happens to it.
    """

    def __init__(self, jobs: Jobs, at: Path, todo: Sequence[Fault], seed: int) -> None:
        self.jobs = jobs
        self.at = at
        self.seed = seed
        self.trials = list[Trial]()
        self._left = list(todo)
        self._open = list[Trial]()
        (at / "out").mkdir(parents=True)
        _, *words = words_of(SLURM, at / "work", at / "out")
        said = jobs.run("submit", "--max-restarts", "20", *words, *PATIENT)
        self.job = said.split("submitted job ")[1].split(":")[0]

    def play(self) -> list[Trial]:
        """The trials, the last with what is wrong with the job."""
        state = self._watch()
        for trial in self._open:
            trial.seconds = -1.0
        output = self.jobs.output(self.job)
        faults = [] if state == "COMPLETED" else [f"the job ended: {state}; {output[-300:]}"]
        if left_over := left_behind(self.job):
            faults.append(f"left behind: {left_over}")
        if "Traceback (most recent call last)" in output:
            faults.append("a traceback in the job's output")
        if not self.trials:
            assert not faults, f"{faults}\n{self.jobs.logs(self.job)}"
            return []
        if faults:
            print(self.jobs.logs(self.job))
        self.trials[-1].faults += faults
        return self.trials

    def _watch(self) -> str:
        """Disturb it; returns the state in which it ended."""
        moments = Moments(self.at / "moments")
        heard = looked = time.monotonic()
        while True:
            for word, name, step in moments.new():
                heard = time.monotonic()
                self._notice(word, name, step)
            now = time.monotonic()
            if now - heard > PATIENCE_S:
                self.jobs.run("cancel", self.job)
                return f"no sign of life for {PATIENCE_S:g} s"
            if now - looked > 2.0:
                looked = now
                state = self.jobs.cluster.field(self.job, "JobState")
                if state in _ENDED:
                    return state
            time.sleep(0.01)

    def _notice(self, word: str, name: str, step: int) -> None:
        if (word, name) == ("end", "step"):
            for trial in [one for one in self._open if step > one.step]:
                trial.seconds += time.monotonic()
                self._open.remove(trial)
        if not self._left:
            return
        fault = self._left[0]
        is_late = 0 < fault.step < step
        if is_late or is_moment(fault, word, name, step):
            self._left.pop(0)
            self._kill(fault)

    def _kill(self, fault: Fault) -> None:
        victim = fault.victims[0]
        try:
            os.kill(_VICTIMS[victim](self.job).pid, signal.SIGKILL)
        except (AssertionError, StopIteration, ProcessLookupError, psutil.Error):
            return  # it does not run now
        trial = Trial(SLURM, self.seed, fault.title, KILL, victim, fault.moment, fault.step)
        trial.seconds = -time.monotonic()
        self.trials.append(trial)
        self._open.append(trial)
