"""The result of a suite: metrics with all their rounds, entries that were not run and the reasons,
and the environment.

A result is one JSON file that conforms to `result.schema.json`, the published schema next to this
module. Every change to the schema increments the number in `FORMAT`.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from hybridflow.errors import DataError, StorageError

FORMAT = "hybridflow-bench/1"
SCHEMA = Path(__file__).with_name("result.schema.json")
PARTS = (
    "hardware",
    "software",
    "commit",
    "recipe",
    "placement",
)  # parts of a fingerprint
REFERENCES = ("limit", "peer", "yardstick")
MIN_ROUNDS = 5  # metrics with fewer rounds are not compared
Better = Literal["lower", "higher", "none"]


@dataclass(frozen=True)
class Reference:
    """The limit, peer or yardstick with which a metric is compared. It has the same unit and is
    measured in the same rounds.
    """

    name: str
    rounds: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median over all rounds."""
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Metric:
    """A quantity measured by an entry.

    Attributes:
        measurement: name of the entry.
        name: `subject/quantity`, unique within a result and node.
        unit: "s", "GB/s", "tokens/s"; "count" for a value that does not vary with the machine's
            load.
        better: "lower" or "higher"; "none" if the metric is shown but not judged.
        rounds: values of all rounds except the warm-up.
        limit: a hardware limit, for example a plain copy of the same bytes.
        peer: another system that does the same work.
        yardstick: the machine's speed in the same rounds, for metrics without a limit or peer.
        node: the node that measured it; empty for a metric that does not belong to a single node.
        bound: smallest relative change in the ratio to the reference that counts as a change; 0.05
            means 5%.
        processes: number of processes that measured in sequence, each with the same number of
            rounds.
    """

    measurement: str
    name: str
    unit: str
    better: Better
    rounds: tuple[float, ...]
    limit: Reference | None = None
    peer: Reference | None = None
    yardstick: Reference | None = None
    node: str = ""
    bound: float = 0.05
    processes: int = 1

    @property
    def value(self) -> float:
        """The median over all rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Median absolute deviation of the rounds from the value, relative to the value."""
        middle = self.value
        distances = [abs(one - middle) for one in self.rounds]
        return statistics.median(distances) / abs(middle) if middle else 0.0

    @property
    def share(self) -> float | None:
        """Fraction of the limit that was achieved; 1 means that the limit was reached."""
        return self.against(self.limit)

    @property
    def ratio(self) -> float | None:
        """Ratio to the peer; above 1 means better than the peer."""
        return self.against(self.peer)

    def against(self, other: Reference | Metric | None) -> float | None:
        """Return how many times as good as the other this metric is; None if either is zero."""
        if other is None or not other.value or not self.value:
            return None
        if self.better == "lower":
            return other.value / self.value
        return self.value / other.value


Rounds = float | Sequence[float]  # a number stands for the value of every round


def measured(
    name: str,
    unit: str,
    values: Rounds,
    better: Better = "none",
    limit: tuple[str, Rounds] | None = None,
    peer: tuple[str, Rounds] | None = None,
    yardstick: tuple[str, Rounds] | None = None,
    bound: float = 0.05,
) -> Metric:
    """Return a metric whose rounds an entry has measured itself. References are (name, rounds)."""
    rounds = _rounds(values, 1)
    given = {"limit": limit, "peer": peer, "yardstick": yardstick}
    references: dict[str, Any] = {}
    for kind, one in given.items():
        if one is not None:
            references[kind] = Reference(one[0], _rounds(one[1], len(rounds)))
    return Metric("", name, unit, better, rounds, bound=bound, **references)


def _rounds(values: Rounds, count: int) -> tuple[float, ...]:
    if isinstance(values, Sequence):
        return tuple(values)
    return (float(values),) * count


@dataclass(frozen=True)
class NotRun:
    """A measurement, or a part of it, that produced no value, with the reason."""

    measurement: str
    why: str
    node: str = ""


@dataclass(frozen=True)
class Result:
    """One run of a suite.

    Attributes:
        suite: name of the suite or of the single entry.
        started: ISO 8601, UTC.
        seconds: duration.
        fingerprint: hardware, software, commit, recipe and placement.
        metrics: metrics of all entries and nodes.
        not_run: entries that produced no values, and why.
        findings: results of checks, each with node, name, level and what.
    """

    suite: str
    started: str = ""
    seconds: float = 0.0
    fingerprint: dict[str, Any] = field(default_factory=lambda: fingerprint_of({}))
    metrics: tuple[Metric, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    findings: tuple[dict[str, str], ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The sorted names of the nodes that measured something."""
        return tuple(sorted({metric.node for metric in self.metrics if metric.node}))

    def joined(self, parts: Iterable[Result], **changes: Any) -> Result:
        """Return this result with the entries of other results appended. `changes` are new values
        for other attributes."""
        every = [self, *parts]
        entries: dict[str, Any] = {}
        for name in ("metrics", "not_run", "findings"):
            each = [getattr(part, name) for part in every]
            entries[name] = tuple(chain.from_iterable(each))
        return replace(self, **entries, **changes)


def write(path: Path, result: Result) -> None:
    """Write the result atomically.

    Raises:
        StorageError: the disk is full, or the folder is not writable.
    """
    write_text(path, json.dumps(as_dict(result), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Raises StorageError like `whole_file`."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to `path` on success.

    Raises:
        StorageError: the disk is full, or the folder is not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError.of(error, str(path)) or error from error


def read(path: Path) -> Result:
    """Read a result.

    Raises:
        DataError: the file is missing, truncated, or not a benchmark result. The message names the
            invalid entry.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); pass a file written by `hybridflow bench run`"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{path}: not a complete JSON file ({error}); it was truncated while being written or "
            "copied; rerun or recopy it"
        ) from error
    form = str(found.get("format", "")) if isinstance(found, dict) else ""
    if not form.startswith("hybridflow-bench/"):
        raise DataError(f"{path}: not a benchmark result (missing `format: {FORMAT}`)")
    if form != FORMAT:
        raise DataError(
            f"{path}: the format is {form}, but this version reads {FORMAT}; update hybridflow"
        )
    _check(path, found)
    del found["format"]
    found["metrics"] = tuple(map(_metric, found["metrics"]))
    found["not_run"] = tuple(NotRun(**entry) for entry in found["not_run"])
    found["findings"] = tuple(found["findings"])
    return Result(**found)


def _check(path: Path, found: dict[str, Any]) -> None:
    import jsonschema

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(found)
    )
    if error:
        place = ".".join(map(str, error.absolute_path)) or "the file"
        raise DataError(
            f"{path}: {place}: {error.message[:200]} (see hybridflow/bench/{SCHEMA.name})"
        )


def _metric(entry: dict[str, Any]) -> Metric:
    own = {one.name: entry[one.name] for one in fields(Metric) if one.name in entry}
    for name in REFERENCES:
        if own[name]:
            own[name] = Reference(own[name]["name"], tuple(own[name]["rounds"]))
    return Metric(**own | {"rounds": tuple(own["rounds"])})


def as_dict(result: Result) -> dict[str, Any]:
    """Return the content of the result file: the result, and the values derived from its rounds."""
    plain = {"format": FORMAT, **asdict(result)}
    for entry, metric in zip(plain["metrics"], result.metrics, strict=True):
        for name in ("value", "spread", "share", "ratio"):
            entry[name] = getattr(metric, name)
        entry["median"] = metric.value
        for name in REFERENCES:
            if reference := getattr(metric, name):
                entry[name]["value"] = reference.value
    return plain


def fingerprint_of(
    environment: dict[str, Any],
    recipe: str | None = None,
    nodes: Sequence[str] = (),
    model: str = "",
) -> dict[str, Any]:
    """Return the fingerprint of a run.

    Args:
        environment: from `hybridflow.observe.environment`.
        recipe: hash of the recipe, if one was run.
        nodes: names of the participating nodes.
        model: processor model.
    """
    hardware = {
        key: environment.get(key) for key in ("cores", "memory_gib", "accelerators")
    }
    software = ("hybridflow", "python", "platform", "packages")
    return {
        "hardware": {"processor": model, **hardware},
        "software": {key: environment.get(key) for key in software},
        "commit": environment.get("git"),
        "recipe": recipe,
        "placement": {
            "nodes": list(nodes),
            "cores_usable": environment.get("cores_usable"),
        },
    }


def differences(one: Result, other: Result) -> dict[str, list[str]]:
    """Return the differences between two fingerprints, grouped by part, in the form `key: A →
    B`."""
    found: dict[str, list[str]] = {}
    for part in PARTS:
        first = flat(one.fingerprint.get(part))
        second = flat(other.fingerprint.get(part))
        for key in sorted({*first, *second}):
            if first.get(key) != second.get(key):
                found.setdefault(part, []).append(
                    f"{key or part}: {first.get(key)} → {second.get(key)}"
                )
    return found


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to a single mapping with dotted keys."""
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, entry in value.items():
        found |= flat(entry, f"{prefix}.{key}".lstrip("."))
    return found


def merge(parts: Iterable[Result]) -> Result:
    """Merge the results that several nodes produced for one suite.

    Raises:
        DataError: the parts are from different suites.
    """
    every = list(parts)
    require_one_suite(every)
    fingerprint = dict(every[0].fingerprint)
    placements = [part.fingerprint["placement"] for part in every]
    nodes = {node for placement in placements for node in placement["nodes"]}
    fingerprint["placement"] = {**placements[0], "nodes": sorted(nodes)}
    return every[0].joined(
        every[1:],
        seconds=max(part.seconds for part in every),
        fingerprint=fingerprint,
    )


def require_one_suite(found: Sequence[Result]) -> None:
    """Raise DataError if the results are from different suites."""
    suites = sorted({one.suite for one in found})
    if len(suites) > 1:
        raise DataError(
            f"the results are from different suites ({', '.join(suites)}); pass results of a "
            "single suite"
        )
