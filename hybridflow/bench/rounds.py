"""Interleaved timing of calls, used by all measurements: rounds, warm-up, references and ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hybridflow.bench.result import Better, Metric, measured

Call = Callable[[], object]
Clock = Callable[[], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """A reference for a metric: a call that is timed in the same rounds as the metric.

    Attributes:
        name: shown next to the metric.
        call: timed once per round.
        scale: the reference's seconds are the measured seconds of `call` multiplied by this factor.
    """

    name: str
    call: Call
    scale: float = 1.0


@dataclass(frozen=True)
class Timed:
    """Calls that are timed in turn. Each of `calls` becomes one metric or, with several peers, one
    metric per peer.

    Attributes:
        calls: the calls, keyed by metric name.
        limit: a hardware limit, for example a copy of the same bytes.
        yardstick: a call that measures the machine's current speed.
        peers: other systems that do the same work.
        amount: quantity that each call processes, which makes the metric a rate; 0 makes it a
            duration in seconds.
        unit: the metric's unit.
        better: "none" shows the metric without judging it. By default, lower seconds and higher
            rates are better.
        bound: smallest relative change that counts as a change.
    """

    calls: Mapping[str, Call]
    limit: Side | None = None
    yardstick: Side | None = None
    peers: Sequence[Side] = ()
    amount: float = 0.0
    unit: str = "s"
    better: Better | None = None
    bound: float = 0.05

    def sides(self) -> dict[str, Call]:
        """Return the calls and references, keyed by name, in the order of the first round."""
        references = [self.limit, self.yardstick, *self.peers]
        return {**self.calls, **{side.name: side.call for side in references if side}}

    def metrics(self, seconds: Mapping[str, Sequence[float]]) -> Iterator[Metric]:
        """Yield the metrics computed from the time that each side took in each round."""

        def rounds(side: Side | None) -> tuple[str, Sequence[float]] | None:
            if side is None:
                return None
            scaled = [side.scale * one for one in seconds[side.name]]
            return side.name, self._values(scaled)

        better = self.better or ("higher" if self.amount else "lower")
        peers: Sequence[Side | None] = self.peers or [None]
        for name in self.calls:
            for peer in peers:
                of_peer = f", beside {peer.name}" if peer and len(peers) > 1 else ""
                yield measured(
                    name + of_peer,
                    self.unit,
                    self._values(seconds[name]),
                    better,
                    limit=rounds(self.limit),
                    peer=rounds(peer),
                    yardstick=rounds(self.yardstick),
                    bound=self.bound,
                )

    def _values(self, seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(self.amount / one if self.amount else one for one in seconds)


def interleaved(
    sides: Mapping[str, Call],
    rounds: int,
    warm_up: int = 1,
    clock: Clock = time.perf_counter,
    before: Call = lambda: None,
) -> dict[str, list[float]]:
    """Time all sides in turn. Returns the seconds that each side took in each round, without
    the `warm_up` rounds.

    Every round runs all sides in a rotating order, so that disturbances affect all of them alike.
    `before` is called before each side, and is not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for name in rotated(list(sides), warm_up + rounds):
        before()
        start = clock()
        sides[name]()
        seconds[name].append(clock() - start)
    return {name: found[warm_up:] for name, found in seconds.items()}


def rotated(names: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield every name once per round, in a rotating order."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def loop() -> int:
    """Run a Python loop for about 10 ms. It serves as the yardstick for interpreted code."""
    total = 0
    table: dict[int, int] = {}
    for number in range(60_000):
        total += number & 7
        table[number & 1023] = total
    return len(table)


def loops(count: int) -> Side:
    """Return a reference that runs `count` plain Python loops."""
    return Side("a plain Python loop", repeated(loop, count))


def repeated(call: Call, times: int) -> Call:
    """Return a call that makes this call several times."""

    def run() -> None:
        for _ in range(times):
            call()

    return run
