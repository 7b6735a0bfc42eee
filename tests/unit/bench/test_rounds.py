"""Calls that are timed in turns: their order, their rounds, and the metrics that follow."""

from __future__ import annotations

from collections.abc import Callable

from hybridflow.bench.rounds import Side, Timed, interleaved, rotated


class Clock:
    """A clock that calls move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def __call__(self) -> float:
        return self.now

    def job(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.called.append(name)
            self.now += seconds * len(self.called)

        return run


def test_every_round_has_every_side_in_an_order_that_rotates() -> None:
    assert list(rotated(["a", "b", "c"], 3)) == [*"abc", *"bca", *"cab"]


def test_rounds_of_the_warm_up_run_and_are_not_counted() -> None:
    clock = Clock()
    sides = {"a": clock.job("a", 1.0), "b": clock.job("b", 10.0)}
    seconds = interleaved(sides, rounds=2, warm_up=1, clock=clock)
    assert clock.called == [*"ab", *"ba", *"ab"]
    assert seconds == {"a": [4.0, 5.0], "b": [30.0, 60.0]}


def test_a_rate_has_its_references_in_its_own_unit() -> None:
    clock = Clock()
    case = Timed(
        {"copy/rate": clock.job("ours", 0.0)},
        limit=Side("bare", clock.job("bare", 0.0), scale=2.0),
        yardstick=Side("loop", clock.job("loop", 0.0)),
        amount=8.0,
        unit="GB/s",
    )
    assert list(case.sides()) == ["copy/rate", "bare", "loop"]
    (metric,) = case.metrics({"copy/rate": [4.0, 2.0], "bare": [1.0, 0.5], "loop": [8.0, 1.0]})
    assert (metric.unit, metric.better, metric.rounds) == ("GB/s", "higher", (2.0, 4.0))
    assert metric.limit is not None and metric.limit.rounds == (4.0, 8.0)
    assert metric.yardstick is not None and metric.yardstick.rounds == (1.0, 8.0)
    assert (metric.share, metric.ratio) == (0.5, None)


def test_seconds_have_one_metric_for_each_of_several_peers() -> None:
    clock = Clock()
    peers = [Side("one", clock.job("one", 0.0)), Side("two", clock.job("two", 0.0))]
    case = Timed({"step": clock.job("ours", 0.0)}, peers=peers)
    found = list(case.metrics({"step": [2.0], "one": [4.0], "two": [1.0]}))
    assert [(metric.name, metric.ratio) for metric in found] == [
        ("step, beside one", 2.0),
        ("step, beside two", 0.5),
    ]
    assert {(metric.unit, metric.better) for metric in found} == {("s", "lower")}
    (single,) = Timed({"step": clock.job("ours", 0.0)}, peers=peers[:1]).metrics(
        {"step": [2.0], "one": [4.0]}
    )
    assert single.name == "step"
