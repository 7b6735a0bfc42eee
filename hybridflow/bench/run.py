"""Running a suite: one measurement after the other, each in a process of its own, with a log of its own."""

from __future__ import annotations

import difflib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from hybridflow.bench import result as results
from hybridflow.bench.files import pooled
from hybridflow.bench.measurements.base import MEASUREMENTS, SUITES, Measurement, builtin
from hybridflow.bench.result import NotRun, Result
from hybridflow.config.registry import absolute_entry, is_user_entry
from hybridflow.errors import ConfigError, DataError
from hybridflow.observe.environment import describe_environment

# One thread, and torch's allocator on huge pages as numpy's is: otherwise the allocator decides, not the code.
CONDITIONS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_worker_niceness": "0",
}
RESULT_VARIABLE = "HYBRIDFLOW_BENCH_RESULT"  # where a script of benchmarks/ writes its metrics
_SCRIPT_S = 1800.0
_LAST = 300  # characters of what a failed measurement said


@dataclass(frozen=True)
class Job:
    """One run of a suite on this node; `nodes` are all that take part."""

    what: str  # a suite or a measurement
    folder: Path
    node: str = ""
    nodes: tuple[str, ...] = ("",)

    @property
    def is_first(self) -> bool:
        """Whether this node runs what one node alone runs."""
        return self.node == self.nodes[0]


def scripts() -> dict[str, Path]:
    """The comparisons with peers, which a checkout has in `benchmarks/`, by name."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    return {path.stem: path for path in sorted(folder.glob("*.py"))} if (folder / "support").is_dir() else {}


def chosen(what: str) -> list[str]:
    """The measurements of a suite, or the one measurement called `what`.

    Raises:
        ConfigError: there is neither; names the nearest.
    """
    if what in SUITES:
        return [name for name, entry in builtin() if what in entry.suites]
    names = [*SUITES, *MEASUREMENTS.names(), *scripts()]
    if is_user_entry(what) or what in names:
        return [what]
    near = difflib.get_close_matches(what, names, n=1, cutoff=0.0)
    raise ConfigError(
        f"there is no suite or measurement {what}; did you mean {near[0]}? (`hybridflow bench list` names them all)"
    )


def run(job: Job, say: Callable[[str], None] = print) -> Result:
    """Run a suite; writes `result.json`, or `nodes/NODE.json` where several nodes take part, after each measurement.

    What fails, takes too long or needs a device that is absent is in the result with its reason.

    Raises:
        ConfigError: no such suite or measurement.
        StorageError: the folder's disk is full.
    """
    names, begun = chosen(job.what), time.time()
    environment = describe_environment()
    found = Result(
        job.what if job.what in SUITES or not is_user_entry(job.what) else Path(job.what).name.replace(".py:", "-"),
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
        0.0,
        results.fingerprint_of(environment, nodes=[node for node in job.nodes if node], model=_processor()),
    )
    path = job.folder / (f"nodes/{job.node}.json" if len(job.nodes) > 1 else "result.json")
    for name in names:
        entry = None if name in scripts() else MEASUREMENTS.get(name)
        if not job.is_first and not (entry and entry.per_node):
            continue
        if entry and entry.needs_gpu and not environment["accelerators"]:
            found = replace(
                found, not_run=(*found.not_run, NotRun(name, "it needs a GPU, and there is none", job.node))
            )
            say(f"{name}: not run: it needs a GPU, and there is none")
            continue
        started = time.monotonic()
        part = _measure(job, name, entry)
        found = replace(
            found,
            seconds=round(time.time() - begun, 1),
            metrics=(*found.metrics, *part.metrics),
            not_run=(*found.not_run, *part.not_run),
            findings=(*found.findings, *part.findings),
            fingerprint={**found.fingerprint, "recipe": part.fingerprint.get("recipe") or found.fingerprint["recipe"]},
        )
        results.write(path, found)
        why = "".join(f"; not run: {entry.why}" for entry in part.not_run)
        say(f"{name}: {len(part.metrics)} metrics in {time.monotonic() - started:.1f} s{why}")
    results.write(path, found)
    return found


def _measure(job: Job, name: str, entry: Measurement | None) -> Result:
    """The metrics of one measurement, of all its processes; of one that fails, a result with the reason alone."""
    parts = []
    # nodes measure each round side by side, which processes that start anew would not
    for part in range(entry.processes if entry and len(job.nodes) == 1 else 1):
        parts.append(_measure_once(job, name, entry, part))
        if not parts[-1].metrics:
            return parts[-1]
    return pooled(parts)


def _measure_once(job: Job, name: str, entry: Measurement | None, part: int) -> Result:
    """The metrics that one process takes; of one that fails, a result with the reason alone."""
    label = absolute_entry(name).rpartition("/")[2].replace(".py:", "-") if is_user_entry(name) else name
    log = job.folder / "logs" / (f"{label}.{job.node}.log" if job.node else f"{label}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    limit_s = entry.timeout_s if entry else _SCRIPT_S
    local = Path(tempfile.mkdtemp(prefix="hybridflow-bench-"))
    out = local / "metrics.json"
    words: Sequence[str] = [sys.executable, "-P", "-m", "hybridflow.bench", absolute_entry(name), "--out", str(out)]
    words = [*words, "--folder", str(job.folder.resolve()), "--local", str(local), "--node", job.node]
    words = [*words, "--part", str(part), "--nodes", *job.nodes] if entry else [sys.executable, str(scripts()[name])]
    environment = {**os.environ, **CONDITIONS, RESULT_VARIABLE: str(out)}
    try:
        with log.open("ab" if part else "wb") as stream:
            code = finish(words, environment, stream, limit_s)
        if code == 0 and out.exists():
            found = results.read(out)
            metrics = tuple(replace(metric, measurement=label) for metric in found.metrics)
            return replace(found, metrics=metrics)
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = last[-1][:_LAST].removeprefix("hybridflow: ") if last else f"it ended with status {code} in silence"
    except subprocess.TimeoutExpired:
        why = f"it was ended after {limit_s:.0f} s; {log.name} has what it said"
    except DataError as error:
        why = str(error)
    finally:
        shutil.rmtree(local, ignore_errors=True)
    return Result(label, "", 0.0, results.fingerprint_of({}), not_run=(NotRun(label, why, job.node),))


def finish(words: Sequence[str], environment: Mapping[str, str], log: IO[bytes], limit_s: float) -> int:
    """The exit status of a command. A command that takes too long, or that is interrupted, ends with all that it has
    started in its session.

    Raises:
        subprocess.TimeoutExpired: it took longer than `limit_s`.
    """
    with subprocess.Popen(
        words, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            return process.wait(limit_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the command itself has not been waited for: its group exists
            raise


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
