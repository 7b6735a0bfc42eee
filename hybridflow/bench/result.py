"""What a suite leaves behind: metrics with all their rounds, what was not run and why, and where all of it ran.

A result is one JSON file in the form of `result.schema.json`, which lies next to this module and is what other programs
may rely on. A new form gets a new number in `FORMAT`; the reader goes on accepting the older ones.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from hybridflow.errors import DataError, StorageError

FORMAT = "hybridflow-bench/1"
SCHEMA = Path(__file__).with_name("result.schema.json")
REFERENCES = ("limit", "peer", "yardstick")  # what may stand next to a metric
MIN_ROUNDS = 5  # a median of fewer rounds is not compared
Better = Literal["lower", "higher", "none"]


@dataclass(frozen=True)
class Reference:
    """What stands next to a metric: a limit of the machine or a peer, of the metric's unit, measured in the same
    rounds."""

    name: str
    rounds: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Metric:
    """One quantity of one measurement.

    Attributes:
        measurement: the entry that took it.
        name: `subject/quantity`, unique within a result and node.
        unit: "s", "GB/s", "tokens/s"; "count" for what does not vary with the machine's load.
        better: whether lower or higher values are better; "none": shown, not judged.
        rounds: the values without those of the warm-up.
        limit: what the machine allows, as a plain copy of the same bytes.
        peer: another system doing the same, where one runs here.
        yardstick: of the same unit and rounds, where there is neither: it shows how fast the machine was just then.
        node: where it was measured, empty for what belongs to no single node.
        bound: change of the ratio to the limit (or peer) that counts as one, 0.05 for 5%.
        processes: in how many processes, one after the other, the rounds were measured, as many in each.
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
        """The median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Median distance of a round from the value, over the value."""
        middle = self.value
        return statistics.median(abs(one - middle) for one in self.rounds) / abs(middle) if middle else 0.0

    @property
    def share(self) -> float | None:
        """How much of the limit is reached: 1 is the limit."""
        return self._against(self.limit)

    @property
    def ratio(self) -> float | None:
        """How many times as good as the peer; above 1: better."""
        return self._against(self.peer)

    def _against(self, other: Reference | None) -> float | None:
        if other is None or not other.value or not self.value:
            return None
        return other.value / self.value if self.better == "lower" else self.value / other.value


@dataclass(frozen=True)
class NotRun:
    """A measurement without a figure, or the part of one, and why."""

    measurement: str
    why: str
    node: str = ""


@dataclass(frozen=True)
class Result:
    """One run of a suite. `fingerprint` has the parts hardware, software, commit, recipe and placement."""

    suite: str
    started: str  # ISO 8601, UTC
    seconds: float
    fingerprint: dict[str, Any]
    metrics: tuple[Metric, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    findings: tuple[dict[str, str], ...] = field(default=())  # of checks: node, name, level, what

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that measured something, sorted."""
        return tuple(sorted({metric.node for metric in self.metrics if metric.node}))


def write(path: Path, result: Result) -> None:
    """Write the file whole or not at all.

    Raises:
        StorageError: the disk is full, or the folder may not be written.
    """
    write_text(path, json.dumps(as_dict(result), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all. StorageError as from `whole_file`."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to fill, which becomes `path` when all went well. StorageError: the disk is full, or may not be
    written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError.of(error, str(path)) or error from error


def read(path: Path) -> Result:
    """Read a result of this form, or a list of figures as earlier versions wrote (`benchmarks/results/NAME.json`).

    Raises:
        DataError: no such file, a truncated one, or one of another program; says what is wrong in it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give a file that `hybridflow bench run` wrote") from error
    except ValueError as error:
        raise DataError(
            f"{path}: is no whole JSON file ({error}); it was cut off while it was written or copied: take it again"
        ) from error
    if isinstance(found, list):
        return _old(path, found)
    if not isinstance(found, dict) or not str(found.get("format", "")).startswith("hybridflow-bench/"):
        raise DataError(f"{path}: is no result of a benchmark (no `format: {FORMAT}` in it)")
    if found["format"] != FORMAT:
        raise DataError(f"{path}: has the form {found['format']}; this version reads {FORMAT} and older: update it")
    _check(path, found)
    return from_dict(found)


def from_dict(found: dict[str, Any]) -> Result:
    """The result that a checked mapping describes."""
    not_run = tuple(NotRun(**entry) for entry in found["not_run"])
    rest = {key: found[key] for key in ("suite", "started", "seconds", "fingerprint")}
    return Result(
        **rest, metrics=tuple(map(_metric, found["metrics"])), not_run=not_run, findings=tuple(found["findings"])
    )


def _metric(entry: dict[str, Any]) -> Metric:
    own = {field.name: entry[field.name] for field in fields(Metric) if field.name in entry}
    references = {name: _reference(own[name]) for name in REFERENCES}
    return Metric(**own | references | {"rounds": tuple(own["rounds"])})


def as_dict(result: Result) -> dict[str, Any]:
    """The file's content: the result, and what follows from its rounds."""
    plain = {"format": FORMAT, **asdict(result)}
    for entry, metric in zip(plain["metrics"], result.metrics, strict=True):
        entry |= {"value": metric.value, "median": metric.value, "spread": metric.spread}
        entry |= {"share": metric.share, "ratio": metric.ratio}
        for name in REFERENCES:
            if (reference := getattr(metric, name)) is not None:
                entry[name]["value"] = reference.value
    return plain


def _reference(entry: dict[str, Any] | None) -> Reference | None:
    return Reference(entry["name"], tuple(entry["rounds"])) if entry else None


def _check(path: Path, found: dict[str, Any]) -> None:
    import jsonschema

    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    errors = sorted(validator.iter_errors(found), key=lambda error: list(map(str, error.absolute_path)))
    if errors:
        place = ".".join(map(str, errors[0].absolute_path)) or "the file"
        raise DataError(f"{path}: {place}: {errors[0].message[:200]} (hybridflow/bench/{SCHEMA.name} says what it has)")


def _old(path: Path, figures: list[Any]) -> Result:
    """Figures without rounds: one round each, so that they are shown and not compared."""
    metrics = []
    for number, figure in enumerate(figures):
        if not isinstance(figure, dict) or not {"metric", "value", "unit"} <= set(figure):
            raise DataError(f"{path}: entry {number} is no figure: it lacks metric, value or unit")
        if not isinstance(figure["value"], (int, float)):
            raise DataError(f"{path}: entry {number}: value is {figure['value']!r}, no number")
        limit = Reference("limit", (float(figure["limit"]),)) if figure.get("limit") is not None else None
        peer = None
        if figure.get("peer") and figure.get("peer_value") is not None:
            peer = Reference(str(figure["peer"]), (float(figure["peer_value"]),))
        unit = str(figure["unit"])
        better: Better = "lower" if unit in ("s", "bytes") else "higher" if unit.endswith("/s") else "none"
        metrics.append(Metric(path.stem, str(figure["metric"]), unit, better, (float(figure["value"]),), limit, peer))
    companion = path.with_name(f"{path.stem}.environment.json")
    try:
        environment: dict[str, Any] = json.loads(companion.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        environment = {}
    return Result(path.stem, str(environment.get("date", "")), 0.0, fingerprint_of(environment), tuple(metrics))


def fingerprint_of(
    environment: dict[str, Any], recipe: str | None = None, nodes: Sequence[str] = (), model: str = ""
) -> dict[str, Any]:
    """The fingerprint from what `hybridflow.observe.environment` says.

    Args:
        environment: versions, platform, cores, memory, accelerators, git.
        recipe: hash of the recipe that ran, where one did.
        nodes: names of the nodes that took part.
        model: of the processor.
    """
    hardware = {key: environment.get(key) for key in ("cores", "memory_gib", "accelerators")}
    software = {key: environment.get(key) for key in ("hybridflow", "python", "platform", "packages")}
    return {
        "hardware": {"processor": model, **hardware},
        "software": software,
        "commit": environment.get("git"),
        "recipe": recipe,
        "placement": {"nodes": list(nodes), "cores_usable": environment.get("cores_usable")},
    }


def differences(one: Result, other: Result) -> dict[str, list[str]]:
    """`part -> what differs` of two fingerprints, as `key: A, then B` in words."""
    found: dict[str, list[str]] = {}
    for part in ("hardware", "software", "commit", "recipe", "placement"):
        first, second = _flat(one.fingerprint.get(part)), _flat(other.fingerprint.get(part))
        lines = [
            f"{key or part}: {first.get(key)} → {second.get(key)}"
            for key in sorted({*first, *second})
            if first.get(key) != second.get(key)
        ]
        if lines:
            found[part] = lines
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        flat |= _flat(entry, f"{prefix}.{key}".lstrip("."))
    return flat


def merge(parts: Iterable[Result]) -> Result:
    """One result of what several nodes measured in the same suite.

    Raises:
        DataError: the parts are of several suites.
    """
    several = list(parts)
    first = several[0]
    if len({part.suite for part in several}) > 1:
        raise DataError(f"results of several suites cannot be merged: {', '.join(sorted({p.suite for p in several}))}")
    nodes = sorted({node for part in several for node in part.fingerprint["placement"]["nodes"]})
    placement = {**first.fingerprint["placement"], "nodes": nodes}
    return replace(
        first,
        seconds=max(part.seconds for part in several),
        fingerprint={**first.fingerprint, "placement": placement},
        metrics=tuple(metric for part in several for metric in part.metrics),
        not_run=tuple(entry for part in several for entry in part.not_run),
        findings=tuple(entry for part in several for entry in part.findings),
    )
