"""Benchmark entries: functions that yield what to time, and where and when they run.

An entry is a file of this package, a file of the checkout's `benchmarks/`, or
`path/to/file.py:name`. It runs in its own process under the conditions of `hybridflow.bench.run`,
so none disturbs the next and one that hangs is ended.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.bench.result import Metric, NotRun
from hybridflow.bench.rounds import Call, Timed, interleaved
from hybridflow.config.registry import Registry, is_user_entry
from hybridflow.errors import ConfigError, ResourceError

SUITES = {
    "preflight": "devices, clocks, disks, links and shared folder of each node (at most 2 minutes)",
    "micro": "parts alone: collectives, columns, planner, store, transports (at most 5 minutes)",
    "rollout": "an engine's tokens a second by concurrency and length, prefix cache, long tail",
    "train": "tokens a second of a training step, and its share of the matrix peak",
    "full": "steps of reinforcement learning of the tiny recipe, by phase (at most 10 minutes)",
    "scale": "the same steps with 1, 2, 4, ... processes: efficiency",
}
ROUNDS = 25
# Memory placement differs by process and stays the same within one: short measurements use several.
PROCESSES = 5
ROUNDS_EACH = 9
_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """Where a measurement runs.

    Attributes:
        node: its name in `nodes`.
        nodes: all that take part, in the same order everywhere.
        folder: the run's folder, which every node sees.
        local: a folder on the node's own disk.
        timeout_s: longest wait for another node.
    """

    node: str
    nodes: tuple[str, ...]
    folder: Path
    local: Path
    timeout_s: float = 60.0

    def meet(self, name: str) -> None:
        """Return when every node is here, within a few hundredths of a second of each other.

        Raises:
            ResourceError: a node did not arrive within `timeout_s`.
        """
        folder = self.folder / "meeting"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.{self.node}").touch()
        missing = list(self.nodes)
        deadline = time.monotonic() + self.timeout_s
        while missing := [
            node for node in missing if not (folder / f"{name}.{node}").exists()
        ]:
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"{', '.join(missing)} did not come to {name} within {self.timeout_s:.0f} s: "
                    f"down, or does not see {self.folder}"
                )
            time.sleep(_POLL_S)


Yielded = Timed | Metric | NotRun | dict[str, str]
Run = Callable[..., Iterable[Yielded]]


@dataclass(frozen=True)
class Measurement:
    """A benchmark entry.

    Attributes:
        run: called with the place and the entry's settings (keyword arguments with defaults).
            Yields calls to time, metrics, what could not be measured, findings of checks (`name`,
            `level`, `what`), and `recipe`, a hash.
        suites: the suites that it belongs to.
        summary: one line.
        per_node: every node runs it, at the same time; otherwise only the first node does.
        needs_gpu: without a GPU it is not run, and the result says so; a call ends when the device
            has finished.
        timeout_s: its process is ended after this time.
        processes: how many processes measure, one after the other; their rounds are judged
            together. With several nodes there is one on each.
        rounds: of each process, without the `warm_up` rounds.
        warm_up: rounds that are not counted.
        cpu_time: count the process's processor time, which other load on the machine affects less.
    """

    run: Run
    suites: tuple[str, ...]
    summary: str
    per_node: bool = False
    needs_gpu: bool = False
    timeout_s: float = 90.0
    processes: int = 1
    rounds: int = ROUNDS
    warm_up: int = 1
    cpu_time: bool = False

    def measure(
        self, place: Place, settings: Sequence[str]
    ) -> Iterable[Metric | NotRun | dict[str, str]]:
        """Run the entry: time what it yields, and pass on the rest."""
        # with several nodes there is one process
        several = self.processes > 1 and len(place.nodes) > 1
        rounds = ROUNDS if several else self.rounds
        clock = time.process_time if self.cpu_time else time.perf_counter
        for one in self.run(place, **self.settings(settings)):
            if isinstance(one, Timed):
                sides = one.sides()
                if self.needs_gpu:
                    sides = {name: _to_its_end(call) for name, call in sides.items()}
                yield from one.metrics(interleaved(sides, rounds, self.warm_up, clock))
            else:
                yield one

    def settings(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the keyword arguments of `run` that `key=value` words set.

        Raises:
            ConfigError: no such setting, or a value of another type.
        """
        parameters = list(inspect.signature(self.run).parameters.values())[1:]
        known = {parameter.name: parameter.default for parameter in parameters}
        given = {}
        for word in words:
            key, _, text = word.partition("=")
            if key not in known or "=" not in word:
                accepted = (
                    ", ".join(f"{name}={value}" for name, value in known.items())
                    or "none"
                )
                raise ConfigError(
                    f"{word}: there is no such setting; settings: {accepted}"
                )
            kind = type(known[key])
            try:
                given[key] = kind(text)
            except ValueError:
                raise ConfigError(
                    f"{word}: the value must be of type {kind.__name__}"
                ) from None
        return given


def _to_its_end(call: Call) -> Call:
    """Return the call followed by a wait for the device."""
    from hybridflow.device.platform import Platform

    platform = Platform.detect()

    def run() -> None:
        call()
        platform.synchronize()

    return run


MEASUREMENTS: Registry[Measurement] = Registry(
    "measurement", "hybridflow.bench.measurements", "measurement"
)


def measurement(name: str, *suites: str, **attributes: Any) -> Callable[[Run], Run]:
    """Register a function as the measurement `name`; `attributes` are those of `Measurement`.

    Raises:
        ConfigError: there is no such suite.
    """
    if unknown := set(suites) - set(SUITES):
        raise ConfigError(
            f"measurement {name}: there is no suite {unknown.pop()} (one of {', '.join(SUITES)})"
        )

    def decorate(run: Run) -> Run:
        paragraph = inspect.cleandoc(run.__doc__ or name).partition("\n\n")[0]
        summary = " ".join(paragraph.split())
        MEASUREMENTS.register(name, Measurement(run, suites, summary, **attributes))
        return run

    return decorate


def comparisons() -> dict[str, Path]:
    """Return the entries of a checkout's `benchmarks/` by name, none for an installed package."""
    folder = Path(__file__).resolve().parents[3] / "benchmarks"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find(name: str) -> Measurement:
    """Return the entry of a name or of `path/to/file.py:name`.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if path := comparisons().get(name):
        root = str(path.parents[1])
        if root not in sys.path:  # entries share code as `benchmarks.support`
            sys.path.append(root)
        return MEASUREMENTS.get(f"{path}:{name}")
    return MEASUREMENTS.get(name)


def chosen(what: str) -> list[str]:
    """Return the names of a suite's entries, or the name of one entry.

    Raises:
        ConfigError: there is neither; names the nearest.
    """
    if what in SUITES:
        return [
            name
            for name in MEASUREMENTS.names()
            if what in MEASUREMENTS.get(name).suites
        ]
    names = [*SUITES, *MEASUREMENTS.names(), *comparisons()]
    if what in names or is_user_entry(what):
        return [what]
    near = difflib.get_close_matches(what, names, n=1, cutoff=0.0)
    raise ConfigError(
        f"there is no suite or measurement {what}; did you mean {near[0]}? "
        "(`hybridflow bench list` names them all)"
    )
