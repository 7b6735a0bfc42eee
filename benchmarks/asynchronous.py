"""Steps of a synchronous run without and with tail batching, of a one-step-off and of an asynchronous run over engines
of a fixed token rate, in virtual time.

The buffer of groups, the requests and their placement are the ones of a run; the engines and the training are clocks.
Lengths of responses are log-normal with median 500 and 99th percentile 5,000 tokens; training takes as long as the
synchronous run generates on average. A second measurement is the throughput of the service while requests wait, with
and without 1 % of the answers 20 times as long.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import DataConfig, RolloutConfig, RunConfig, TrainerConfig
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.rollout.evaluation import Scoring
from hybridflow.rollout.groups import Groups
from hybridflow.rollout.requests import Requests
from hybridflow.workers.rollout import response_columns
from support.report import Figure, write

ENGINES, PROMPTS, SAMPLES, STEPS = 8, 128, 8, 24
MOST, RATE = 16384, 50.0  # tokens of a response; tokens a second of a request
MEDIAN, P99 = 500, 5000
_POLL_S = 1.0  # between two looks at the engines
RUNNING = 64  # requests that an engine runs at a time
TAIL = 0.25  # prompts beyond those of a step, as a share of them, with tail batching


class Engine:
    """Requests of known lengths, so many at a time, each at the same rate."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.running: list[tuple[float, int]] = []  # when it ends, ticket; sorted as a heap
        self.queued: deque[tuple[int, float]] = deque()  # ticket, seconds
        self.ended: list[int] = []
        self.now = self.busy = self.first_idle = 0.0

    def add(self, ticket: int, seconds: float) -> None:
        """Take a request."""
        self.queued.append((ticket, seconds))
        self._fill()

    def advance(self, now: float) -> None:
        """Go on until this moment."""
        while self.running and self.running[0][0] <= now:
            self.now, ticket = heapq.heappop(self.running)
            self.ended.append(ticket)
            self._fill()
        self.now = now

    def abort(self, tickets: set[int]) -> None:
        """Give the places of these requests to others."""
        self.busy -= sum(end - self.now for end, ticket in self.running if ticket in tickets)
        self.running = [(end, ticket) for end, ticket in self.running if ticket not in tickets]
        heapq.heapify(self.running)
        self.queued = deque((ticket, seconds) for ticket, seconds in self.queued if ticket not in tickets)
        self._fill()

    def _fill(self) -> None:
        while self.queued and len(self.running) < self.places:
            ticket, seconds = self.queued.popleft()
            self.busy += seconds
            heapq.heappush(self.running, (self.now + seconds, ticket))


class Engines(Requests):
    """The service over `Engine`s. A poll takes until something ends, and a moment more."""

    def __init__(self, config: RunConfig, lengths: np.ndarray) -> None:
        super().__init__(config)
        self.now, self.lengths = 0.0, lengths
        self.engines = [Engine(config.rollout.max_running_requests) for _ in range(config.rollout.num_engines)]

    def advance(self, now: float) -> None:
        """Go on until this moment."""
        self.now = now
        for engine in self.engines:
            engine.advance(now)

    def _serving(self) -> Sequence[int]:
        return range(len(self.engines))

    def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        for number, part in parts.items():
            for ticket in part["ticket"].tolist():
                self.engines[number].add(ticket, float(self.lengths[ticket]) / RATE)

    def _collect(self, training: bool, engines: Sequence[int], wait_s: float) -> Sequence[DataProto]:
        if not any(self.engines[number].ended for number in engines):
            self.advance(
                min(self.engines[number].running[0][0] for number in engines if self.engines[number].running) + _POLL_S
            )
        return [self._brought(self.engines[number]) for number in engines]

    def _brought(self, engine: Engine) -> DataProto:
        tickets, engine.ended = engine.ended, []
        answer = Completion([0], [0.0], "stop", (WeightSpan("0", 0, 1),))
        return response_columns([answer] * len(tickets)).with_columns(ticket=np.array(tickets, np.int64))

    def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        raise RuntimeError("nothing is saved")

    def _leave_out_lost(self, answers: int) -> None:
        raise RuntimeError("these engines are never lost")

    def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        for number, part in tickets.items():
            self.engines[number].abort(set(part))

    def _forget(self, engines: Sequence[int]) -> None:
        raise RuntimeError("nothing is given up")


class Rows:
    """Prompts of one token."""

    def __len__(self) -> int:
        return PROMPTS * STEPS

    def batch(self, rows: np.ndarray) -> DataProto:
        """The prompts of these rows."""
        return DataProto.from_columns({"prompt_ids": Jagged.from_rows([[1]] * len(rows), np.int64)})


class Unscored:
    """Rewards that cost nothing."""

    def begin(self, batch: DataProto, size: int) -> list[Scoring]:
        """An empty part for each group."""
        return [Scoring((), ())] * (len(batch) // size)

    def forget(self, parts: Sequence[Scoring]) -> None:
        """Nothing was begun."""


def config_of(staleness: int = 0, tail: float = 0.0, ahead: int | None = None) -> RunConfig:
    """The run that is looked at."""
    return RunConfig(
        data=DataConfig(train_batch_size=PROMPTS, max_response_length=MOST),
        rollout=RolloutConfig(n=SAMPLES, num_engines=ENGINES, max_running_requests=RUNNING),
        trainer=TrainerConfig(total_steps=STEPS, max_staleness=staleness, steps_ahead=ahead, tail_batching=tail),
    )


def lengths_of(count: int, seed: int) -> np.ndarray:
    """Tokens of so many responses."""
    sigma = np.log(P99 / MEDIAN) / 2.326348
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), sigma, count)
    return np.minimum(np.maximum(drawn, 1), MOST).astype(np.int64)


def run(
    staleness: int, training_s: float, tail: float = 0.0, ahead: int | None = None
) -> tuple[float, float, float, float]:
    """Seconds a step, the share of the trainer's time in which it waits, the idle share of the engines' places, and the
    weight versions since the prompts of a step were handed out, in the mean."""
    config = config_of(staleness, tail, ahead)
    count = 2 * PROMPTS * SAMPLES * STEPS  # what tail batching cuts off is answered anew, at most once
    engines, waited, age = Engines(config, lengths_of(count, 1)), 0.0, 0.0
    given: Any = (engines, Rows(), lambda batch: batch, Unscored(), lambda: engines.now)
    groups = Groups(config, *given)
    for version in range(STEPS):
        before = engines.now
        groups.next_batch(version)
        waited += engines.now - before
        age += groups.metrics.get("rollout/staleness/mean", 0.0)
        engines.advance(engines.now + training_s)
    busy = sum(engine.busy for engine in engines.engines)
    return engines.now / STEPS, waited / engines.now, 1 - busy / (engines.now * ENGINES * RUNNING), age / STEPS


def throughput(long_share: float) -> float:
    """Tokens a second while requests wait, of the same tokens in all with and without long answers."""
    count = PROMPTS * SAMPLES * STEPS
    lengths = np.full(count, MEDIAN)
    long = np.random.default_rng(2).random(count) < long_share
    lengths[long] *= 20
    engines = Engines(config_of(), lengths)
    engines.submit(Rows().batch(np.arange(count)), training=True)
    while engines._waiting:
        engines.poll()
    done = sum(engine.busy for engine in engines.engines) - sum(
        sum(end - engines.now for end, _ in engine.running) + sum(seconds for _, seconds in engine.queued)
        for engine in engines.engines
    )
    return done * RATE / engines.now


def main() -> None:
    """Simulate, and write the results."""
    training_s = run(0, 0.0)[0]
    synchronous, figures = 0.0, []
    for staleness, tail, ahead in ((0, 0.0, None), (0, TAIL, None), (1, 0.0, None), (4, 0.0, None), (4, 0.0, 4)):
        step_s, waits, idle, age = run(staleness, training_s, tail, ahead)
        synchronous = synchronous or step_s
        name = f"tail_batching {tail}" if tail else f"max_staleness {staleness}"
        name += "" if ahead is None else f", steps_ahead {ahead}"
        figures += [
            Figure(f"{name}: a step", step_s, "s", "synchronous", synchronous, synchronous / step_s),
            Figure(f"{name}: trainer waits", waits, "of its time"),
            Figure(f"{name}: places of engines idle", idle, "of their time"),
            Figure(f"{name}: age of prompts", age, "weight versions"),
        ]
    plain, tailed = throughput(0.0), throughput(0.01)
    name = "throughput with 1 % of answers 20 times as long"
    figures.append(Figure(name, tailed, "tokens/s", "without", plain, tailed / plain))
    conditions = {"time": "virtual", "steps": STEPS, "prompts": PROMPTS, "samples": SAMPLES, "engines": ENGINES}
    write("asynchronous", figures, {**conditions, "running": RUNNING})


if __name__ == "__main__":
    main()
