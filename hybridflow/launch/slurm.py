"""Asking Slurm: submit a job, say how it stands, show its logs, cancel it."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridflow.errors import ResourceError
from hybridflow.launch import records, verdict
from hybridflow.launch.job import Job

_TIMEOUT_S = 60.0
_LOOK_S = 0.5  # between two looks at the output of a job that is followed
_LOOKS = 10  # at the output for each question to slurmctld, which serves everybody


def submit(job: Job, script: str) -> str:
    """Hand the script to sbatch; returns the job's number and keeps the script in the job's folder.

    Raises:
        ResourceError: there is no Slurm here, or it refuses the job.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    # An allocation that the user is in would otherwise set options of the new job.
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(("SLURM_", "SBATCH_")):
            environment[name] = value
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    number = _ask(["sbatch", "--parsable"], script, environment | kept).strip().split(";")[0]
    folder = job.out / number
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "job.sbatch").write_text(script, encoding="utf-8")
    return number


def submitted(job: Job, number: str) -> str:
    """Return the lines that tell a user about a submitted job."""
    spares = f" and {job.spares} spare" if job.spares else ""
    return (
        f"submitted job {number}: {job.name} on {job.nodes} node(s){spares}\n"
        f"output: {job.out / f'{number}.out'}\n"
        f"hybridflow slurm status {number}; hybridflow slurm logs {number} --follow; hybridflow "
        f"slurm cancel {number}"
    )


def status(job: str, out: Path) -> str:
    """A line of Slurm's about the job, and one for each start that has ended. ResourceError: Slurm
    does not answer."""
    lines = _queued(job) or [f"{job} is not in Slurm's queue"]
    attempts = verdict.read_attempts(out / job)
    lines += [f"  start {one.restart}: {one.outcome}, {one.why}" for one in attempts]
    return "\n".join(lines)


def follow(job: str, out: Path) -> Iterator[str]:
    """The job's own output as it is written, to the end of the job: the driver's lines and the
    verdict of each start.

    Raises:
        ResourceError: nothing is known of this job, or Slurm does not answer.
    """
    if not _queued(job):
        log_files(job, out)
    path = out / f"{job}.out"
    position = 0
    queued = True
    for look in itertools.count():
        if look % _LOOKS == 0:
            queued = bool(_queued(job))
        if path.is_file():
            with path.open("rb") as file:
                file.seek(position)
                added = file.read()
            if queued:
                added = added[: added.rfind(b"\n") + 1]  # whole lines, which cut no character
            position += len(added)
            if added:
                yield added.decode(errors="replace")
        if not queued:
            return
        time.sleep(_LOOK_S)


def _queued(job: str) -> list[str]:
    """Slurm's lines about a job that waits or runs; none once it has ended."""
    try:
        listed = _ask(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%i %T, %D nodes (%R), %M of %l"]
        )
    except ResourceError as error:
        if "Invalid job id" not in str(error):
            raise
        listed = ""  # Slurm forgets a job some minutes after its end
    return [line.strip() for line in listed.splitlines()]


def log_files(job: str, out: Path) -> list[tuple[str, Path]]:
    """(label, file) of everything that the job has written, by restart: preflight, driver, nodes.

    Raises:
        ResourceError: nothing is known of this job here.
    """
    folder = out / job
    if not folder.is_dir():
        raise ResourceError(
            f"{folder} is absent: give the job's number, and the --output-dir that it was "
            "submitted with"
        )
    files = []
    for start in sorted(
        folder.glob("restart-*"), key=lambda path: int(path.name.rpartition("-")[2])
    ):
        number = start.name.rpartition("-")[2]
        named = [
            start / "preflight.err",
            start / records.DRIVER_LOG,
            *sorted(start.glob("node-*.log")),
            start / "ray.err",
        ]
        files += [
            (f"{number} {path.stem}", path)
            for path in named
            if path.is_file() and path.stat().st_size
        ]
    own = out / f"{job}.out"
    return [*files, *([("job", own)] if own.is_file() else [])]


def joined(files: Sequence[tuple[str, Path]]) -> str:
    """All logs, each line with its label."""
    width = max((len(label) for label, _ in files), default=0)
    lines = []
    for label, path in files:
        lines += [
            f"{label:<{width}} | {line}" for line in path.read_text(errors="replace").splitlines()
        ]
    return "\n".join(lines)


def cancel(jobs: Sequence[str]) -> None:
    """Cancel the jobs. ResourceError: Slurm does not know one of them."""
    _ask(["scancel", *jobs])


def _ask(
    words: Sequence[str], text: str | None = None, environment: dict[str, str] | None = None
) -> str:
    try:
        asked = subprocess.run(
            words,
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise ResourceError(
            f"{words[0]} is not here: run this on a login node of a Slurm cluster, or load its "
            "module"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ResourceError(
            f"{words[0]} did not answer within {_TIMEOUT_S:.0f} s; is slurmctld up (scontrol ping)?"
        ) from error
    if asked.returncode:
        raise ResourceError(
            f"{words[0]}: {asked.stderr.strip() or f'ended with status {asked.returncode}'}"
        )
    return asked.stdout
