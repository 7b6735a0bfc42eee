"""Access to run folders: reads results, finds baselines for each type of hardware, and creates
archives.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from hybridflow.bench import result as results
from hybridflow.bench.result import Metric, Reference, Result
from hybridflow.errors import ConfigError, DataError

RESULT = "result.json"
ARCHIVED = (".json", ".log", ".html", ".prom", ".csv", ".out", ".err")


def load(path: Path) -> Result:
    """Load a result file. For a run folder, load its `result.json` or merge its node results.

    Raises:
        DataError: there is no result, or it is truncated or not a benchmark result.
    """
    if not path.is_dir():
        return results.read(path)
    if (path / RESULT).exists():
        return results.read(path / RESULT)
    nodes = sorted((path / "nodes").glob("*.json"))
    if not nodes:
        raise DataError(
            f"{path}: no {RESULT} found; pass a folder or file written by `hybridflow bench run`"
        )
    return results.merge(map(results.read, nodes))


def load_all(paths: Sequence[Path]) -> list[Result]:
    """Load results, oldest first. For a folder that contains several runs, load all of them.

    Raises:
        DataError: a result cannot be read, or the results are from different suites.
    """
    found: list[Result] = []
    for path in paths:
        is_run = (path / RESULT).exists() or (path / "nodes").exists()
        runs = [] if is_run else sorted(path.glob(f"*/{RESULT}"))
        found += map(load, runs or [path])
    results.require_one_suite(found)
    return sorted(found, key=lambda one: one.started)


def pooled(runs: Sequence[Result]) -> Result:
    """Return the last of several runs, with the rounds of all runs merged into its metrics, so that
    differences between runs on the same system widen the spread.
    """
    by_key: dict[tuple[str, str], list[Metric]] = defaultdict(list)
    for run in runs:
        for metric in run.metrics:
            by_key[metric.node, metric.name].append(metric)
    last = runs[-1]
    same = [by_key[metric.node, metric.name] for metric in last.metrics]
    return replace(last, metrics=tuple(map(_pooled, same)))


def _pooled(same: Sequence[Metric]) -> Metric:
    """Return the last of these metrics, with the rounds of all of them."""
    joined: dict[str, Any] = dict.fromkeys(results.REFERENCES)
    for name in results.REFERENCES:
        parts = [getattr(one, name) for one in same]
        if all(parts):
            rounds = chain.from_iterable(part.rounds for part in parts)
            joined[name] = Reference(parts[-1].name, tuple(rounds))
    each = {len(one.rounds) / one.processes for one in same}
    return replace(
        same[-1],
        rounds=tuple(chain.from_iterable(one.rounds for one in same)),
        processes=sum(one.processes for one in same) if len(each) == 1 else 1,
        **joined,
    )


def baseline_path(folder: Path, result: Result) -> Path:
    """Return the path of the suite's baseline for the hardware of `result`."""
    hardware = json.dumps(result.fingerprint["hardware"], sort_keys=True).encode()
    return folder / f"{result.suite}-{hashlib.sha256(hardware).hexdigest()[:12]}.json"


def find_baseline(folder: Path, result: Result) -> Result:
    """Return the baseline with which to compare `result`.

    Raises:
        ConfigError: there is no baseline for this hardware. The message lists the existing ones.
    """
    path = baseline_path(folder, result)
    if path.exists():
        return results.read(path)
    others = []
    for file in sorted(folder.glob(f"{result.suite}-*.json")):
        differences = results.differences(results.read(file), result)
        words = differences.get("hardware", ["this hardware"])
        others.append(f"an existing baseline differs in {', '.join(words)}")
    existing = f" ({'; '.join(others)})" if others else ""
    raise ConfigError(
        f"{folder} contains no baseline of {result.suite} for this hardware{existing}; create one "
        "with `hybridflow bench baseline RESULT ...`"
    )


def archive(folder: Path, out: Path) -> Path:
    """Pack a run's results, pages and logs into one compressed file, and return its path.

    Raises:
        ConfigError: the folder is not a run folder.
        StorageError: the disk is full or not writable.
    """
    load(folder)
    # without the names of the owner and the group
    anonymous = partial(
        tarfile.TarInfo.replace, uid=0, gid=0, uname="", gname="", deep=False
    )
    top = Path(folder.resolve().name)
    with results.whole_file(out) as temporary, tarfile.open(temporary, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.suffix in ARCHIVED:
                name = top / path.relative_to(folder)
                tar.add(path, arcname=str(name), filter=anonymous)
    return out
