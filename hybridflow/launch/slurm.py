"""Slurm commands: submit a job, show its state and logs, cancel it."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridflow.errors import ResourceError
from hybridflow.launch import bad_nodes, records, verdict
from hybridflow.launch.job import Job
from hybridflow.launch.site import Site

_TIMEOUT_S = 60.0
_NO_CLUSTER = "Could not establish a configuration source"  # printed by Slurm's library
_LOOK_S = 0.5  # interval between two reads of a followed job's output
_LOOKS = 10  # reads of the output per query of slurmctld, which all users share


def submit(job: Job, script: str) -> str:
    """Submit the script with sbatch, save it in the job's folder, and return the job id.

    Raises:
        ResourceError: Slurm is not available here or rejects the job.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    # Inside an allocation, the user's environment would override options of the new job.
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


def submitted(job: Job, number: str, site: Site) -> str:
    """Return the lines shown to the user about a submitted job."""
    spares = f" and {job.spares} spare" if job.spares else ""
    avoided = "".join(f"{line}\n" for line in bad_nodes.described(bad_nodes.excluded(site)))
    return (
        f"{avoided}submitted job {number}: {job.name} on {job.nodes} node(s){spares}\n"
        f"output: {job.out / f'{number}.out'}\n"
        f"hybridflow slurm status {number}; hybridflow slurm logs {number} --follow; hybridflow "
        f"slurm cancel {number}"
    )


def status(job: str, out: Path) -> str:
    """Return Slurm's status line for the job, followed by one line for each finished attempt.
    Raises ResourceError if Slurm does not respond.
    """
    lines = _queued(job) or [f"{job} is not in Slurm's queue"]
    attempts = verdict.read_attempts(out / job)
    lines += [f"  start {one.restart}: {one.outcome}, {one.why}" for one in attempts]
    return "\n".join(lines)


def follow(job: str, out: Path) -> Iterator[str]:
    """Yield the job's output (the driver's lines, and the verdict on each attempt) as it is
    written, until the job ends.

    Raises:
        ResourceError: the job is unknown, or Slurm does not respond.
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
                added = added[: added.rfind(b"\n") + 1]  # whole lines, so no character is cut
            position += len(added)
            if added:
                yield added.decode(errors="replace")
        if not queued:
            return
        time.sleep(_LOOK_S)


def _queued(job: str) -> list[str]:
    """Return Slurm's status lines for a pending or running job; an empty list once it has ended."""
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
    """Return (label, path) for all logs of the job, ordered by restart, and within a restart:
    preflight, driver, nodes.

    Raises:
        ResourceError: `out` contains no logs of this job.
    """
    folder = out / job
    if not folder.is_dir():
        raise ResourceError(
            f"{folder} does not exist; pass the job ID and the --output-dir it was submitted with"
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
    """Merge all logs into one text, with each line prefixed by its label."""
    width = max((len(label) for label, _ in files), default=0)
    lines = []
    for label, path in files:
        lines += [
            f"{label:<{width}} | {line}" for line in path.read_text(errors="replace").splitlines()
        ]
    return "\n".join(lines)


def cancel(jobs: Sequence[str]) -> None:
    """Cancel the jobs. Raises ResourceError if one of them is unknown to Slurm."""
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
            f"{words[0]} not found; run this on a login node of a Slurm cluster, or load its module"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ResourceError(
            f"{words[0]} did not answer within {_TIMEOUT_S:.0f} s; is slurmctld up (scontrol ping)?"
        ) from error
    if asked.returncode:
        if _NO_CLUSTER in asked.stderr:
            raise ResourceError(
                f"{words[0]} found no slurm.conf on this machine; run this on a login node of a "
                "Slurm cluster, or set SLURM_CONF"
            )
        raise ResourceError(
            f"{words[0]}: {asked.stderr.strip() or f'exited with status {asked.returncode}'}"
        )
    return asked.stdout
