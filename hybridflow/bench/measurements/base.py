"""Benchmark entries: functions that yield calls to time, and the conditions under which they run.

An entry is defined in a file in this package, a file in the checkout's `benchmarks/`, or
`path/to/file.py:name`. `hybridflow.bench.run` runs each entry in a separate process, so that it
does not affect the next one and can be killed if it hangs.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.bench.result import Metric, NotRun
from hybridflow.bench.rounds import Call, Timed, interleaved
from hybridflow.config.registry import Registry, is_user_entry
from hybridflow.errors import ConfigError, ResourceError

SUITES = {
    "preflight": "devices, clocks, disks, links and shared folder of each node (at most 2 minutes)",
    "micro": "single components: collectives, columns, planner, store, transports (at most 5 min)",
    "rollout": "an engine's tokens per second by concurrency and length, prefix cache, long tail",
    "train": "tokens per second of a training step, and its share of the matrix peak",
    "full": "reinforcement-learning steps of the tiny recipe, by phase (at most 10 minutes)",
    "scale": "the same steps with 1, 2, 4, ... processes: efficiency",
}
ROUNDS = 25
# Memory placement is constant within a process but differs between processes, so short measurements
# use several.
PROCESSES = 5
ROUNDS_EACH = 9
_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """The nodes and folders that a measurement uses.

    Attributes:
        node: this node's name in `nodes`.
        nodes: all participating nodes, in the same order on every node.
        folder: the run folder, shared by all nodes.
        local: a folder on the node's local disk.
        timeout_s: maximum wait for another node.
    """

    node: str
    nodes: tuple[str, ...]
    folder: Path
    local: Path
    timeout_s: float = 60.0

    @property
    def rank(self) -> int:
        """This node's index in `nodes`."""
        return self.nodes.index(self.node)

    def meet(self, name: str) -> None:
        """Barrier: wait until every node has arrived. All nodes return within a few hundredths of a
        second of each other.

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
                    f"{', '.join(missing)} did not reach {name} within {self.timeout_s:.0f} s; "
                    f"check that each node is up and can access {self.folder}"
                )
            time.sleep(_POLL_S)


Yields = Iterator[Timed | Metric | NotRun | dict[str, str]]
Run = Callable[..., Yields]


@dataclass(frozen=True)
class Measurement:
    """A benchmark entry.

    Attributes:
        run: called with the `Place` and the entry's settings (keyword arguments with defaults).
            Yields calls to be timed, metrics, parts that could not be measured, findings (`name`,
            `level`, `what`), and the recipe's hash (`recipe`).
        suites: names of the suites that include the entry.
        summary: one-line description.
        per_node: if True, all nodes run it at the same time; otherwise only the first node does.
        needs_gpu: if True, the entry is skipped on machines without a GPU, which the result
            reports, and each call is timed until the device has finished.
        timeout_s: time limit, after which its process is killed.
        processes: number of processes that measure in sequence. Their rounds are judged together.
            With several nodes, there is one process on each.
        rounds: rounds per process, without the `warm_up` rounds.
        warm_up: number of discarded rounds.
        cpu_time: measure the process's CPU time, which is less affected by other load on the
            machine.
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
    ) -> Iterator[Metric | NotRun | dict[str, str]]:
        """Run the entry. Times the calls that it yields and passes everything else through."""
        # with several nodes there is one process
        several = self.processes > 1 and len(place.nodes) > 1
        rounds = ROUNDS if several else self.rounds
        clock = time.process_time if self.cpu_time else time.perf_counter
        for one in self.run(place, **self.settings(settings)):
            if isinstance(one, Timed):
                sides = one.sides()
                if self.needs_gpu:
                    sides = {name: synchronized(call) for name, call in sides.items()}
                yield from one.metrics(interleaved(sides, rounds, self.warm_up, clock))
            else:
                yield one

    def settings(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse words of the form `key=value` as keyword arguments of `run`.

        Raises:
            ConfigError: there is no such setting, or a value is of the wrong type.
        """
        _, *parameters = inspect.signature(self.run).parameters.values()
        known = {parameter.name: parameter.default for parameter in parameters}
        given = {}
        for word in words:
            key, _, text = word.partition("=")
            if key not in known or "=" not in word:
                accepted = (
                    ", ".join(f"{name}={value}" for name, value in known.items())
                    or "none"
                )
                raise ConfigError(f"{word}: no such setting; settings: {accepted}")
            kind = type(known[key])
            try:
                given[key] = kind(text)
            except ValueError:
                raise ConfigError(
                    f"{word}: the value must be of type {kind.__name__}"
                ) from None
        return given


def synchronized(call: Call) -> Call:
    """Wrap a call so that it synchronizes the device before returning."""
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
    """Register a function as the measurement `name`. `attributes` are those of `Measurement`.

    Raises:
        ConfigError: there is no such suite.
    """
    if unknown := set(suites) - set(SUITES):
        raise ConfigError(
            f"measurement {name}: suite {unknown.pop()} not found; suites: {', '.join(SUITES)}"
        )

    def decorate(run: Run) -> Run:
        paragraph = inspect.cleandoc(run.__doc__ or name).partition("\n\n")[0]
        summary = " ".join(paragraph.split())
        MEASUREMENTS.register(name, Measurement(run, suites, summary, **attributes))
        return run

    return decorate


def comparisons() -> dict[str, Path]:
    """Return the entries in the checkout's `benchmarks/`, keyed by name; empty for an installed
    package."""
    folder = Path(__file__).resolve().parents[3] / "benchmarks"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find(name: str) -> Measurement:
    """Return the entry with this name, or the entry at `path/to/file.py:name`.

    Raises:
        ConfigError: there is no such entry. The message suggests the nearest name.
    """
    if path := comparisons().get(name):
        root = str(path.parents[1])
        if root not in sys.path:  # entries share code as `benchmarks.support`
            sys.path.append(root)
        return MEASUREMENTS.get(f"{path}:{name}")
    return MEASUREMENTS.get(name)


def chosen(what: str) -> list[str]:
    """Return the names of all entries in a suite, or the name of a single entry.

    Raises:
        ConfigError: there is no such suite or entry. The message suggests the nearest name.
    """
    builtin = MEASUREMENTS.names()
    if what in SUITES:
        return [name for name in builtin if what in MEASUREMENTS.get(name).suites]
    names = [*SUITES, *builtin, *comparisons()]
    if what in names or is_user_entry(what):
        return [what]
    near = difflib.get_close_matches(what, names, n=1, cutoff=0.0)
    raise ConfigError(
        f"no suite or measurement named {what}; did you mean {near[0]}? "
        "(`hybridflow bench list` lists all)"
    )
