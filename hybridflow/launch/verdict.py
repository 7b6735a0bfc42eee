"""The verdict on a job: one line with the reason why it ended, and whether it is done, requeued or
given up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, RunStopped
from hybridflow.launch import records

STOPPED = RunStopped.exit_code
SAME_STEP = 3  # the job is given up if this many consecutive starts end with the same checkpoint
_TAIL = "--- last lines of its log ---"


@dataclass(frozen=True)
class Attempt:
    """The outcome of one attempt to run the job."""

    restart: int
    outcome: str  # finished | stopped | failed
    why: str
    checkpoint: str  # the folder of the current checkpoint; empty if there is none
    next: str  # done | requeue | give up | left to Slurm, which has already ended this start


def judge(
    job_dir: Path,
    restart: int,
    max_restarts: int,
    run_dir: Path,
    driver_status: int | None,
    *,
    asked: bool = False,
    state: str = "RUNNING",
    why: str = "",
) -> tuple[Attempt, str, int]:
    """Determine how this attempt ended. Returns the attempt, the tail of the log that shows the
    reason, and the exit status for the job's script (75 requests a requeue).

    Args:
        job_dir: the job's folder. Earlier attempts are read from it, and this one is recorded
            there.
        restart: number of times that Slurm has restarted the job.
        max_restarts: after this many restarts, a failure is final; stops on request are not
            counted.
        run_dir: the run's folder, which contains the current checkpoint.
        driver_status: the driver's exit status; None if it did not run.
        asked: True if Slurm had asked the job to stop.
        state: the job's state in Slurm; only a running job is requeued.
        why: the reason, if the job's script has already determined it.
    """
    folder = job_dir / f"restart-{restart}"
    checkpoint = str(
        (records.read(run_dir / "checkpoints" / "latest.json") or {}).get("folder", "")
    )
    earlier = read_attempts(job_dir)
    # srun reports a step as finished if Slurm has lost its node; the job's state then shows the
    # loss. UNKNOWN means that Slurm gave no answer, which does not contradict a driver that ended
    # well.
    if driver_status == 0 and state in ("RUNNING", "UNKNOWN"):
        return _note(job_dir, Attempt(restart, "finished", "finished", checkpoint, "done")), "", 0
    stopped = driver_status == STOPPED or (asked and driver_status is None)
    reason, log_tail = (
        ("stopped at Slurm's request", "") if stopped else _cause(folder, driver_status, why)
    )
    failed_before = sum(attempt.outcome == "failed" for attempt in earlier)
    lost = [attempt.checkpoint for attempt in earlier[-(SAME_STEP - 1) :]] + [checkpoint]
    is_refused = driver_status == ConfigError.exit_code
    then = "give up"
    code = driver_status if driver_status and driver_status != STOPPED else 1
    if state != "RUNNING":
        then = "left to Slurm"
        reason = f"{reason}; Slurm has set the job's state to {state}"
    elif not stopped and (is_refused or failed_before >= max_restarts):
        reason += (
            f" (all {max_restarts} restarts were used)" if max_restarts and not is_refused else ""
        )
    elif len(lost) == SAME_STEP and len(set(lost)) == 1:
        reason += f"; gave up: {SAME_STEP} starts in a row ended at {checkpoint or 'no checkpoint'}"
    else:
        then = "requeue"
        code = STOPPED
        reason = f"{reason}; requeued to resume from {checkpoint or 'the beginning'}"
    attempt = Attempt(restart, "stopped" if stopped else "failed", reason, checkpoint, then)
    return _note(job_dir, attempt), log_tail, code


def read_attempts(job_dir: Path) -> list[Attempt]:
    """Return the outcomes of the job's earlier attempts, oldest first."""
    try:
        lines = (job_dir / records.ATTEMPTS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    attempts: list[Attempt] = []
    for line in lines:
        if line.startswith("{") and line.endswith("}"):
            attempts.append(Attempt(**json.loads(line)))
    return attempts


def _note(job_dir: Path, attempt: Attempt) -> Attempt:
    job_dir.mkdir(parents=True, exist_ok=True)
    with (job_dir / records.ATTEMPTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(attempt)) + "\n")
    return attempt


def _cause(folder: Path, driver_status: int | None, why: str) -> tuple[str, str]:
    """Return a one-line description of the first failure, and the log that shows it."""
    names = _node_names(folder)
    if failed := records.failures(folder):
        first = failed[0]
        log_tail = str(first.get("tail", ""))
        return f"node {first['node']}: {first['what']}{_last(log_tail)}", log_tail
    if killed := _killed_agent(folder / "ray.err"):
        return killed, records.tail(folder / "ray.err")
    if why:
        return why, ""
    text = records.tail(folder / records.DRIVER_LOG, 200)
    place = text.rfind("\nhybridflow: ") + 1 or (0 if text.startswith("hybridflow: ") else None)
    if place is None:
        shown = "\n".join(text.splitlines()[-20:])
        return (
            f"the driver exited with status {driver_status} without a message{_last(shown)}",
            shown,
        )
    message, _, log_tail = text[place:].partition(_TAIL)
    first_line = _with_names(message.splitlines()[0].removeprefix("hybridflow: "), names)
    return first_line + _last(log_tail), text[place:]


def _killed_agent(errors: Path) -> str:
    """Return srun's message about a node on which the process that monitors Ray has exited, for
    example because a user or the kernel killed it.
    """
    for line in records.tail(errors, 50).splitlines():
        if found := re.match(
            r"srun: error: (?:(\S+): tasks? \S+ (.+)|(Node failure on \S+|Task launch .+))", line
        ):
            return (
                found[3]
                or f"node {found[1].rstrip(':')}: the process watching Ray exited ({found[2]})"
            )
    return ""


def _node_names(folder: Path) -> dict[str, str]:
    chosen: list[dict[str, Any]] = (records.read(folder / records.CHOSEN) or {}).get("use", [])
    return {str(entry["address"]): str(entry["node"]) for entry in chosen}


def _with_names(line: str, names: dict[str, str]) -> str:
    """Replace addresses with node names."""
    return re.sub(r"\d+\.\d+\.\d+\.\d+", lambda found: names.get(found[0], found[0]), line)


def _last(log_tail: str) -> str:
    lines: Sequence[str] = [line.strip() for line in log_tail.splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""
