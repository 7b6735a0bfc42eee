"""Runs the entries of a suite in sequence, each in a separate process with its own log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from hybridflow.bench import result as results
from hybridflow.bench.files import RESULT, pooled
from hybridflow.bench.measurements.base import SUITES, Measurement, chosen, find
from hybridflow.bench.result import NotRun, Result
from hybridflow.config.registry import absolute_entry, is_user_entry
from hybridflow.errors import ConfigError, DataError
from hybridflow.observe.environment import describe_environment, processor_model
from hybridflow.process.secret import VARIABLE, job_secret

# One thread, and huge pages for torch's allocator like numpy's: otherwise the allocator would
# dominate the comparison.
CONDITIONS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_worker_niceness": "0",
}
_LAST = 300  # maximum characters of a failed entry's last line
_NO_GPU = "it needs a GPU, but none was found"


@dataclass(frozen=True)
class Job:
    """A run of a suite or entry on this node. `nodes` lists all participating nodes."""

    what: str
    folder: Path
    node: str = ""
    nodes: tuple[str, ...] = ("",)
    settings: tuple[str, ...] = ()  # `key=value` words for a single entry


def label_of(name: str) -> str:
    """Return the name used for an entry in files and results: `my-mine` for
    `path/to/my.py:mine`."""
    return Path(name).name.replace(".py:", "-") if is_user_entry(name) else name


def run(job: Job, say: Callable[[str], None] = print) -> Result:
    """Run a suite, and write its result after each entry.

    The file is `result.json`, or `nodes/NODE.json` if several nodes participate. If an entry fails,
    times out or needs a missing device, the result contains the reason.

    Raises:
        ConfigError: there is no such suite, entry or setting.
        StorageError: the folder's disk is full.
    """
    entries = {name: find(name) for name in chosen(job.what)}
    if job.settings and job.what in SUITES:
        raise ConfigError(
            f"{job.settings[0]}: a suite takes no settings; run one of its entries by name"
        )
    for entry in entries.values():
        entry.settings(job.settings)
    begun = time.time()
    environment = describe_environment()
    nodes = list(filter(None, job.nodes))
    found = Result(
        suite=label_of(job.what),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
        fingerprint=results.fingerprint_of(
            environment, nodes=nodes, model=processor_model()
        ),
    )
    path = job.folder / (f"nodes/{job.node}.json" if len(job.nodes) > 1 else RESULT)
    for name, entry in entries.items():
        if job.node != job.nodes[0] and not entry.per_node:
            continue
        started = time.monotonic()
        if entry.needs_gpu and not environment["accelerators"]:
            part = _without(job, name, _NO_GPU)
        else:
            part = _measure(job, name, entry)
        recipe = part.fingerprint["recipe"] or found.fingerprint["recipe"]
        found = found.joined(
            [part],
            seconds=round(time.time() - begun, 1),
            fingerprint={**found.fingerprint, "recipe": recipe},
        )
        results.write(path, found)
        why = "".join(f"; not run: {one.why}" for one in part.not_run)
        took = time.monotonic() - started
        say(f"{name}: {len(part.metrics)} metrics in {took:.1f} s{why}")
    results.write(path, found)
    return found


def _without(job: Job, name: str, why: str) -> Result:
    """Return a result without metrics that contains only the reason why an entry did not run."""
    label = label_of(name)
    return Result(label, not_run=(NotRun(label, why, job.node),))


def _measure(job: Job, name: str, entry: Measurement) -> Result:
    """Return the metrics of an entry pooled over all its processes, or the reason why a process
    failed."""
    parts = []
    # nodes measure each round at the same time, which restarted processes could not
    for part in range(entry.processes if len(job.nodes) == 1 else 1):
        parts.append(_measure_once(job, name, entry, part))
        if not parts[-1].metrics:
            return parts[-1]
    return pooled(parts)


def _measure_once(job: Job, name: str, entry: Measurement, part: int) -> Result:
    label = label_of(name)
    of_node = f".{job.node}" if job.node else ""
    log = job.folder / "logs" / f"{label}{of_node}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    local = Path(tempfile.mkdtemp(prefix="hybridflow-bench-"))
    described = {
        **asdict(job),
        "name": absolute_entry(name),
        "label": label,
        "folder": job.folder.resolve(),
        "local": local,
        "part": part,
        "out": local / "metrics.json",
    }
    (local / "job.json").write_text(
        json.dumps(described, default=str), encoding="utf-8"
    )
    words = [sys.executable, "-P", "-m", "hybridflow.bench", str(local / "job.json")]
    try:
        environment = {**os.environ, **CONDITIONS}
        environment.setdefault(VARIABLE, job_secret())  # of the stores of entries
        with log.open("ab" if part else "wb") as stream:
            code = finish(words, environment, stream, entry.timeout_s)
        if code == 0:
            return results.read(local / "metrics.json")
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        why = last.strip()[:_LAST].removeprefix("hybridflow: ")
        why = why or f"it exited with status {code} without any output"
    except subprocess.TimeoutExpired:
        why = (
            f"it was killed after {entry.timeout_s:.0f} s; see its output in {log.name}"
        )
    except DataError as error:
        why = str(error)
    finally:
        shutil.rmtree(local, ignore_errors=True)
    return _without(job, name, why)


def finish(
    words: Sequence[str], environment: Mapping[str, str], log: IO[bytes], limit_s: float
) -> int:
    """Run a command and return its exit status.

    On a timeout or interrupt, all processes in its session are killed.

    Raises:
        subprocess.TimeoutExpired: the command took longer than `limit_s`.
    """
    with subprocess.Popen(
        words,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(limit_s)
        except BaseException:
            # the command has not been reaped yet, so its process group still exists
            os.killpg(process.pid, signal.SIGKILL)
            raise
