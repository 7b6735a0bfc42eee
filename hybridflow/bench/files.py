"""Folders of runs: reading what is in them, baselines of a kind of machine, and archives."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridflow.bench import result as results
from hybridflow.bench.result import Reference, Result
from hybridflow.errors import ConfigError, DataError

RESULT = "result.json"


def load(path: Path) -> Result:
    """A result file, or the folder of a run: its `result.json`, or what its nodes have written.

    Raises:
        DataError: there is none, or it is truncated or foreign.
    """
    if not path.is_dir():
        return results.read(path)
    if (path / RESULT).exists():
        return results.read(path / RESULT)
    nodes = sorted((path / "nodes").glob("*.json"))
    if not nodes:
        raise DataError(f"{path}: has no {RESULT}; give a folder or file that `hybridflow bench run` wrote")
    return results.merge(results.read(node) for node in nodes)


def load_all(paths: Sequence[Path]) -> list[Result]:
    """Results by their time, oldest first; a folder of runs counts as all of its runs.

    Raises:
        DataError: one cannot be read, or they are of several suites.
    """
    found = []
    for path in paths:
        runs = [] if (path / RESULT).exists() or (path / "nodes").exists() else sorted(path.glob(f"*/{RESULT}"))
        found += [results.read(run) for run in runs] or [load(path)]
    suites = sorted({one.suite for one in found})
    if len(suites) > 1:
        raise DataError(f"these are results of several suites ({', '.join(suites)}); give those of one")
    return sorted(found, key=lambda one: one.started)


def pooled(runs: Sequence[Result]) -> Result:
    """The last of several runs with the rounds of all of them in each metric, so that what differs between runs of an
    equal system widens the spread."""
    last = runs[-1]
    metrics = []
    for metric in last.metrics:
        key = (metric.node, metric.name)
        same = [one for run in runs for one in run.metrics if (one.node, one.name) == key]
        joined = {"rounds": tuple(value for one in same for value in one.rounds)}
        equal = len({len(one.rounds) / one.processes for one in same}) == 1
        joined["processes"] = sum(one.processes for one in same) if equal else 1  # type: ignore[assignment]
        for name in results.REFERENCES:
            parts = [getattr(one, name) for one in same]
            if parts[-1] is not None and all(part is not None for part in parts):
                joined[name] = Reference(parts[-1].name, tuple(v for part in parts for v in part.rounds))  # type: ignore[assignment]
            elif parts[-1] is not None:
                joined[name] = None  # type: ignore[assignment]
        metrics.append(replace(metric, **joined))  # type: ignore[arg-type]
    return replace(last, metrics=tuple(metrics))


def baseline_path(folder: Path, result: Result) -> Path:
    """The baseline of a suite on the hardware of `result`."""
    hardware = json.dumps(result.fingerprint["hardware"], sort_keys=True).encode()
    return folder / f"{result.suite}-{hashlib.sha256(hardware).hexdigest()[:12]}.json"


def find_baseline(folder: Path, result: Result) -> Result:
    """The baseline to judge `result` by.

    Raises:
        ConfigError: there is none of this hardware; says what others there are.
    """
    path = baseline_path(folder, result)
    if path.exists():
        return results.read(path)
    others = [results.read(other) for other in sorted(folder.glob(f"{result.suite}-*.json"))]
    there = "; ".join(
        f"one of {', '.join(results.differences(other, result).get('hardware', ['this hardware']))}" for other in others
    )
    raise ConfigError(
        f"{folder} has no baseline of {result.suite} on this hardware{f' ({there})' if there else ''}; take one with "
        "`hybridflow bench baseline RESULT ...`"
    )


def archive(folder: Path, out: Path) -> Path:
    """Pack the results, pages and logs of a run into one compressed file; returns it.

    Raises:
        ConfigError: the folder is not of a run.
        StorageError: the disk is full, or may not be written.
    """
    load(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    kept = [path for path in files if path.suffix in (".json", ".log", ".html", ".prom", ".csv", ".md", ".out", ".err")]
    with results.whole_file(out) as temporary, tarfile.open(temporary, "w:gz") as tar:
        for path in kept:
            tar.add(path, arcname=str(Path(folder.resolve().name) / path.relative_to(folder)), filter=_anonymous)
    return out


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry without its owner's name."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
