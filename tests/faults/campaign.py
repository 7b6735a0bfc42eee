"""One run that is disturbed again and again until it has finished."""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from tests.e2e.runs import Run
from tests.faults import limits, victims
from tests.faults.faults import (
    CHECKPOINTS_REMOVED,
    DAMAGED,
    FULL,
    KILL,
    KILL_TWO,
    NO_INODES,
    NO_MEMORY,
    NO_RIGHTS,
    NO_SHARED_MEMORY,
    OF_PROCESSES,
    PAUSE,
    READ_ONLY,
    SAVE_REMOVED,
    SLOW,
    STOP,
    Fault,
)

PATIENCE_S = 420.0  # without any sign of life a trial has failed
PAUSED_S = 4.0  # how long a driver, or what is to go on by itself, stands still
FROZEN_S = 8.0  # how long a disk takes no write
REMEDIES = ("same command", "run again", "start over", "start a new run", "Point it to")
OF_DISKS = ("free space", "make it writable")  # a remedy of a message that says where
SHARED_MEMORY = Path("/dev/shm")
FILLER_OF_SHARED_MEMORY = SHARED_MEMORY / "hybridflow-faults-filler"


@dataclass
class Trial:
    """What came of one disturbance."""

    shape: str
    seed: int
    title: str
    kind: str
    victim: str
    moment: str
    step: int
    ended: bool = False  # the driver ended over it, and the same command was given again
    message: str = ""  # what it said then
    seconds: float = 0.0  # until the next whole step was finished; -1: none came
    faults: list[str] = field(default_factory=list)


class Campaign:
    """The run of a shape with the disturbances of a seed.

    Args:
        words: its command line.
        folder: its run folder.
        durations: median seconds of each moment of an undisturbed run.
        output: where output goes.
    """

    def __init__(
        self,
        shape: str,
        seed: int,
        words: list[str],
        folder: Path,
        durations: dict[str, float],
        output: Path,
    ) -> None:
        self.shape = shape
        self.seed = seed
        self.words = words
        self.folder = folder
        self.durations = durations
        self.output = output
        self.trials = list[Trial]()
        self._open = list[Trial]()
        self._due: tuple[float, Fault] | None = None
        self._restored: tuple[float, Callable[[], object]] | None = None
        self._filler = folder.parent / "filler"
        self._empty_files = folder.parent / "empty"

    def play(self, todo: Sequence[Fault]) -> list[Trial]:
        """Give the command until the run has finished; returns a trial for each disturbance that
        took place."""
        left = list(todo)
        starts = 0
        while True:
            starts += 1
            code = self._play_once(left)
            if code == 0 or starts > 3 * len(todo) + 3:
                break
            self._repair()
        for trial in self._open:
            trial.seconds = -1.0
        if code != 0:
            self.trials[-1].faults.append(f"the run does not finish: {self.trials[-1].message}")
        return self.trials

    # ---- one start of the command

    def _play_once(self, left: list[Fault]) -> int:
        before = set(os.listdir(SHARED_MEMORY))
        moments = Moments(moments_path(self.folder))
        self._is_driver_starved = False
        with Run(self.output, *self.words) as run:
            killed = self._watch(run, moments, left)
            code = run.process.returncode
            self._thaw(run)
            nothing_left = run.left_behind(within_s=25 if killed else 8)
            out = run.out
            err = run.err
        FILLER_OF_SHARED_MEMORY.unlink(missing_ok=True)
        leaked = sorted(set(os.listdir(SHARED_MEMORY)) - before)
        problems = [f"left behind: {nothing_left}"] if nothing_left else []
        problems += [f"shared memory left: {leaked}"] if leaked else []
        for name in leaked:
            (SHARED_MEMORY / name).unlink(missing_ok=True)
        if "Traceback (most recent call last)" in out + err:
            problems.append(
                f"a traceback: {(out + err)[(out + err).index('Traceback (most') :][-600:]}"
            )
        if code != 0 and not killed:
            problems += problems_of_message(err, code, self.folder.parent)
        if self.trials:
            trial = self.trials[-1]
            trial.faults += problems
            if code != 0:
                trial.message = "" if killed else err.strip()[-500:]
                trial.ended = True
        return code

    def _watch(self, run: Run, moments: Moments, left: list[Fault]) -> bool:
        """Disturb the run until it ends; returns whether it was we who ended it."""
        killed = False
        heard = time.monotonic()
        while run.process.poll() is None:
            for word, name, step in moments.new():
                heard = time.monotonic()
                self._notice(word, name, step, left)
            now = time.monotonic()
            if self._due is not None and now >= self._due[0]:
                fault = self._due[1]
                self._due = None
                killed = self._disturb(run, fault) or killed
                heard = now
            if self._restored is not None and now >= self._restored[0]:
                self._restored[1]()
                self._restored = None
            if now - heard > PATIENCE_S:
                heard = now
                self.trials[-1].faults.append(f"no sign of life for {PATIENCE_S:.0f} s")
                run._look()
                os.kill(run.process.pid, signal.SIGKILL)
                killed = True
            time.sleep(0.003)
        self._due = None
        if self._restored is not None:
            self._restored[1]()
            self._restored = None
        return killed or (self._is_driver_starved and run.process.returncode == -signal.SIGKILL)

    def _notice(self, word: str, name: str, step: int, left: list[Fault]) -> None:
        now = time.monotonic()
        if word == "end" and name == "step":
            for trial in [trial for trial in self._open if step > trial.step]:
                trial.seconds = now - trial.seconds
                self._open.remove(trial)
        if not left or self._due is not None:
            return
        fault = left[0]
        late = bool(step and fault.step and step > fault.step)  # its own moment is past
        if late or is_moment(fault, word, name, step):
            left.pop(0)
            length = 0.0 if late else self.durations.get(name, 1.0)
            self._due = (now + fault.part * length, fault)

    # ---- disturbances

    def _disturb(self, run: Run, fault: Fault) -> bool:
        """Do it; returns whether the driver itself was killed by it."""
        found = self._victims(run, fault) if fault.kind in OF_PROCESSES else []
        if fault.kind in OF_PROCESSES and not found:
            return False
        if fault.kind == READ_ONLY and not _mount(self.folder.parent, "remount,ro"):
            return False  # a file is open for writing, and the kernel refuses: nothing has happened
        if fault.kind == SAVE_REMOVED and not self._remove_save():
            return False
        names = tuple(name for name, _ in found)
        fault = replace(fault, victims=names)  # those that ran
        trial = Trial(
            self.shape,
            self.seed,
            fault.title,
            fault.kind,
            " and ".join(names) or fault.kind,
            fault.moment,
            fault.step,
        )
        trial.seconds = time.monotonic()
        self.trials.append(trial)
        self._open.append(trial)
        for name, pid in found:
            self._disturb_process(fault.kind, name, pid)
        if fault.kind == DAMAGED:
            self._damage_next = fault.draw
            os.kill(run.process.pid, signal.SIGKILL)
        elif fault.kind == SLOW:
            limits.freeze(self.folder.parent)
            self._restored = (
                time.monotonic() + FROZEN_S,
                functools.partial(limits.thaw, self.folder.parent),
            )
        elif fault.kind == FULL:
            _fill(self._filler)
        elif fault.kind == NO_SHARED_MEMORY:
            _fill(FILLER_OF_SHARED_MEMORY)
        elif fault.kind == NO_INODES:
            _fill_with_files(self._empty_files)
        elif fault.kind == NO_RIGHTS:
            limits.set_immutable(self.folder, True)
        elif fault.kind == CHECKPOINTS_REMOVED:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        return fault.kind == DAMAGED or (fault.kind in (KILL, KILL_TWO) and "driver" in names)

    def _victims(self, run: Run, fault: Fault) -> list[tuple[str, int]]:
        """Name and process id of each process that the fault meets: those named first that run."""
        run._look()
        wanted = 2 if fault.kind == KILL_TWO else 1
        found = list[tuple[str, int]]()
        for name in fault.victims:
            pid = victims.find(run, name, self.folder / "logs")
            if pid is not None and len(found) < wanted:
                found.append((name, pid))
        return found if len(found) == wanted else []

    def _disturb_process(self, kind: str, name: str, pid: int) -> None:
        if kind == NO_MEMORY:
            limits.starve(pid)
            self._is_driver_starved |= name == "driver"
            return
        os.kill(pid, signal.SIGKILL if kind in (KILL, KILL_TWO) else signal.SIGSTOP)
        if kind == PAUSE or (kind == STOP and name == "driver"):
            self._restored = (
                time.monotonic() + PAUSED_S,
                functools.partial(_continue, pid),
            )

    def _remove_save(self) -> bool:
        """Remove a checkpoint that is being written; returns whether there was one within 5 s."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            for path in (self.folder / "checkpoints").glob("*.partial"):
                shutil.rmtree(path, ignore_errors=True)
                return True
            time.sleep(0.001)
        return False

    _damage_next: float | None = None
    _is_driver_starved = False  # since its start; the kernel kills it when it next asks for memory

    def _repair(self) -> None:
        """Between two starts: space is made, the file system can be written; a checkpoint is
        damaged, refused, and whole again."""
        if os.path.ismount(self.folder.parent):
            _mount(self.folder.parent, "remount,rw")
            self._filler.unlink(missing_ok=True)
            shutil.rmtree(self._empty_files, ignore_errors=True)
            limits.set_immutable(self.folder, False)
        if self._damage_next is not None:
            self._offer_damage(self._damage_next)
            self._damage_next = None

    def _offer_damage(self, draw: float) -> None:
        """Flip a byte of the checkpoint in force: the command must refuse it and name the file."""
        trial = self.trials[-1]
        chance = random.Random(draw)
        store = self.folder / "checkpoints"
        files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size)
        names = (
            [path for path in files if path == store / "latest.json"]
            if chance.random() < 0.1
            else []
        )
        in_force = re.findall('"folder": "([^"]+)"', (store / "latest.json").read_text())[0]
        path = chance.choice(
            names or [path for path in files if path.is_relative_to(store / in_force)]
        )
        at = chance.randrange(path.stat().st_size)
        whole = path.read_bytes()
        trial.title += (
            f", byte {at} of {path.relative_to(store / in_force) if not names else path.name}"
        )
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :]
        )
        with Run(self.output, *self.words) as run:
            try:
                code = run.end(PATIENCE_S)
            except AssertionError:
                trial.faults.append("a damaged checkpoint hangs the run")
                return
            finally:
                path.write_bytes(whole)
            if code == 0:
                trial.faults.append(f"{path} was damaged and nobody said so")
            elif path.name not in run.err and path.parent.name not in run.err:
                trial.faults.append(f"the message does not name {path}: {run.err[-400:]}")
            if "Traceback (most recent call last)" in run.out + run.err:
                trial.faults.append(
                    f"a traceback over a damaged checkpoint: {(run.out + run.err)[-600:]}"
                )
            trial.message = run.err.strip()[-500:]

    def _thaw(self, run: Run) -> None:
        """What we stopped and nobody ended goes on, so that it can be seen to end by itself."""
        for pid, start in list(run.seen):
            try:
                process = psutil.Process(pid)
                if process.create_time() == start and process.status() == psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGCONT)
            except psutil.Error:
                continue  # it has ended


class Moments:
    """The new lines of the announcer's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = ""
        self._at = path.stat().st_size if path.exists() else 0

    def new(self) -> Iterator[tuple[str, str, int]]:
        """(begin | end, name, step) of each."""
        if not self._path.exists():
            return
        if self._path.stat().st_size <= self._at:
            return
        with self._path.open() as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._at += len(whole.encode())
        for line in whole.splitlines():
            word, name, step, _ = line.split(" ")
            yield word, moment_of(name), int(step)


def moments_path(folder: Path) -> Path:
    """Where the announcer writes: outside of the file system of the run folder, which may be
    full."""
    return folder.parents[1] / "moments"


def durations(path: Path) -> dict[str, float]:
    """Median seconds of each moment in an announcer's file."""
    began = dict[str, float]()
    found = dict[str, list[float]]()
    for line in path.read_text().splitlines():
        word, title, _, at = line.split(" ")
        name = moment_of(title)
        if word == "begin":
            began[name] = float(at)
        else:
            found.setdefault(name, []).append(float(at) - began[name])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def moment_of(name: str) -> str:
    """The name of a moment for a stage's or phase's title."""
    if name.startswith("start_") and "ranks" in name:
        return "start_ranks"
    known = {
        "engine_workers": "start_engine_workers",
        "plan_the": "plan_the_sync",
        "export": "export",
    }
    return next((moment for piece, moment in known.items() if piece in name), name)


def is_moment(fault: Fault, word: str, name: str, step: int) -> bool:
    if fault.moment == "shutdown":
        return (word, name) == ("end", "export")
    return word == "begin" and name == fault.moment and step == fault.step


def problems_of_message(err: str, code: int, place: Path) -> list[str]:
    """What is wrong with the last words of a driver that ended by itself. `place`: the file system
    of its run."""
    found = []
    if code < 0 or not err.strip():
        found.append(f"ended with {code} and the words {err[-300:]!r}")
    elif any(word in err for word in OF_DISKS) and str(place) not in "".join(err.split()):
        # lines may be wrapped
        found.append(f"the message names no file or folder: {err[-500:]}")
    elif not any(word in err for word in (*REMEDIES, *OF_DISKS)):
        found.append(f"no remedy in the message: {err[-500:]}")
    return found


def _fill(filler: Path) -> None:
    """Take all space that is left."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def _fill_with_files(folder: Path) -> None:
    """Take all inodes that are left. Those taken before may still be taken."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in itertools.count():
        try:
            (folder / str(number)).touch()
        except OSError:
            return


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):  # it was ended meanwhile
        os.kill(pid, signal.SIGCONT)


def _mount(folder: Path, options: str) -> bool:
    """Whether the kernel did it."""
    command = ["mount", "-o", options, str(folder)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
