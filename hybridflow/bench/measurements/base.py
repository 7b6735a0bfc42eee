"""What a measurement is: a function that yields metrics, and where and when it is run.

A measurement is a file of this package, or `path/to/file.py:name` of the user's. It runs in a process of its own, under
the conditions of `hybridflow.bench.run`, so that none disturbs the next and one that hangs is ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.bench.result import Metric, NotRun
from hybridflow.config.registry import Registry
from hybridflow.errors import ConfigError, ResourceError

SUITES = {
    "preflight": "devices, clocks, disks, links and the shared folder of each node (at most 2 minutes)",
    "micro": "parts alone: collectives, columns, packing, planner, store, transports, checkpoints (at most 5 minutes)",
    "rollout": "an engine's tokens a second by concurrency and length, prefix cache, long tail",
    "train": "tokens a second of a training step, and its share of the matrix peak",
    "full": "steps of reinforcement learning of the tiny recipe, by phase (at most 10 minutes)",
    "scale": "the same steps with 1, 2, 4, ... processes: efficiency",
}
ROUNDS = 25
# Where memory lies differs by process and stays as it is in each: short measurements are taken in several.
PROCESSES, ROUNDS_EACH = 5, 9
_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """Where a measurement runs.

    Attributes:
        node: its name in `nodes`.
        nodes: all that take part, in the same order everywhere.
        folder: of this run, which every node sees.
        local: a folder on the node's own disk.
        timeout_s: longest wait for another node.
    """

    node: str
    nodes: tuple[str, ...]
    folder: Path
    local: Path
    timeout_s: float = 60.0

    def meet(self, name: str) -> None:
        """Return when every node is here: they go on within a few hundredths of a second of each other.

        Raises:
            ResourceError: one is not within `timeout_s`; names it.
        """
        folder = self.folder / "meeting"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.{self.node}").touch()
        missing, deadline = list(self.nodes), time.monotonic() + self.timeout_s
        while missing := [node for node in missing if not (folder / f"{name}.{node}").exists()]:
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"{', '.join(missing)} did not come to {name} within {self.timeout_s:.0f} s: down, or does not "
                    f"see {self.folder}"
                )
            time.sleep(_POLL_S)


Run = Callable[[Place], Iterable[Metric | NotRun | dict[str, str]]]


@dataclass(frozen=True)
class Measurement:
    """An entry.

    Attributes:
        run: yields metrics, what could not be measured, findings of checks (`name`, `level`, `what`), and the
            `recipe`'s hash.
        suites: that it belongs to.
        summary: one line.
        per_node: every node runs it, at the same time; else the first node alone.
        needs_gpu: it is not run where there is none, and the result says so.
        timeout_s: after which its process is ended.
        processes: how many take it, one after the other; the rounds of all are judged together. Where several nodes
            take part, one on each.
    """

    run: Run
    suites: tuple[str, ...]
    summary: str
    per_node: bool = False
    needs_gpu: bool = False
    timeout_s: float = 90.0
    processes: int = 1


MEASUREMENTS: Registry[Measurement] = Registry("measurement", "hybridflow.bench.measurements", "measurement")


def measurement(name: str, *suites: str, **settings: Any) -> Callable[[Run], Run]:
    """Register a function as the measurement `name`; `settings` are further attributes of `Measurement`. ConfigError:
    there is no such suite."""
    if unknown := set(suites) - set(SUITES):
        raise ConfigError(f"measurement {name}: there is no suite {unknown.pop()} (one of {', '.join(SUITES)})")

    def decorate(run: Run) -> Run:
        summary = (run.__doc__ or name).strip().splitlines()[0]
        MEASUREMENTS.register(name, Measurement(run, suites, summary, **settings))
        return run

    return decorate


def interleaved(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int = ROUNDS,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each side in each round; every round runs all sides, in an order that turns, so that a disturbance
    hits all. `clock`: time.process_time counts the processor's seconds, which others on the machine move less."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            sides[name]()
            took = clock() - start
            if turn >= warm_up:
                seconds[name].append(took)
    return seconds


def rates(amount: float, seconds: Sequence[float]) -> tuple[float, ...]:
    """Amounts a second of each round."""
    return tuple(amount / one for one in seconds)


def loop() -> int:
    """About a hundredth of a second of Python's own work: the yardstick of what is bound by the interpreter."""
    total = 0
    table: dict[int, int] = {}
    for number in range(60_000):
        total += number & 7
        table[number & 1023] = total
    return len(table)


def builtin() -> Iterator[tuple[str, Measurement]]:
    """All built-in measurements by name."""
    for name in MEASUREMENTS.names():
        yield name, MEASUREMENTS.get(name)
