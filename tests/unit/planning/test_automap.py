"""Auto-mapping finds what trying everything finds, and is quick for thousands of devices."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import pytest

from hybridflow.planning.automap import Option, Problem, partitions, search
from hybridflow.planning.schedule import Seconds, step_seconds


def brute_force(problem: Problem) -> float | None:
    """The shortest step over all partitions, all whole allocations and all options, one by one."""
    best: float | None = None
    for partition in partitions(problem.models):
        for sizes in allocations(problem.devices, len(partition)):
            pools = []
            for pool, size in zip(partition, sizes, strict=True):
                pools.append(
                    [
                        chosen
                        for chosen in product(*(usable(problem, model, size) for model in pool))
                        if sum(o.held for o in chosen) + max(o.working for o in chosen)
                        <= problem.memory
                    ]
                )
            for choice in product(*pools):
                seconds = [added(o.seconds for o in chosen) for chosen in choice]
                found = step_seconds(seconds, problem.overlaps)
                best = found if best is None else min(best, found)
    return best


def added(seconds: Iterable[Seconds]) -> Seconds:
    a, b, c, d = map(sum, zip(*seconds, strict=True))
    return a, b, c, d


def usable(problem: Problem, model: str, size: int) -> list[Option]:
    return [o for o in problem.options(model, max(problem.sizes)) if o.devices <= size]


def allocations(devices: int, pools: int) -> Iterator[tuple[int, ...]]:
    if pools == 0:
        yield ()
        return
    for first in range(1, devices - pools + 2):
        for rest in allocations(devices - first, pools - 1):
            yield (first, *rest)


def random_problem(seed: int) -> Problem:
    draw = random.Random(seed)
    devices = draw.randint(2, 6)
    models = tuple("abcd"[: draw.randint(1, 3)])
    sizes = tuple(sorted(draw.sample(range(1, devices + 1), draw.randint(1, devices))))
    table: dict[str, list[Option]] = {}
    for model in models:
        table[model] = [
            Option(
                draw.choice(sizes),
                draw.randint(0, 6),
                draw.randint(0, 4),
                (some(draw), some(draw), some(draw), some(draw)),
            )
            for _ in range(draw.randint(1, 3))
        ]

    def options(model: str, size: int) -> Sequence[Option]:
        return [option for option in table[model] if option.devices <= size]

    return Problem(
        models, devices, sizes, draw.randint(4, 14), options, overlaps=draw.random() < 0.4
    )


def some(draw: random.Random) -> float:
    return float(draw.choice([0, draw.randint(1, 20)]))


@pytest.mark.parametrize("seed", range(0, 240, 20))
def test_the_search_is_as_good_as_trying_everything(seed: int) -> None:
    for number in range(seed, seed + 20):
        problem = random_problem(number)
        found = search(problem)
        assert (found.seconds if found else None) == brute_force(problem), number
        if found:
            check(problem, found.pools, found.devices)


def check(
    problem: Problem, pools: Sequence[Sequence[tuple[str, Option]]], sizes: Sequence[int]
) -> None:
    assert sorted(model for pool in pools for model, _ in pool) == sorted(problem.models)
    assert sum(sizes) <= problem.devices
    for pool, size in zip(pools, sizes, strict=True):
        assert all(option.devices <= size for _, option in pool)
        assert sum(o.held for _, o in pool) + max(o.working for _, o in pool) <= problem.memory


def test_every_partition_comes_once() -> None:
    found = {frozenset(frozenset(pool) for pool in one) for one in partitions("abcd")}
    assert len(found) == len(list(partitions("abcd"))) == 15


def test_four_models_on_4096_devices_take_seconds() -> None:
    sizes = tuple(
        sorted({base << power for base in (1, 3) for power in range(13) if base << power <= 4096})
    )

    def options(model: str, size: int) -> list[Option]:
        work = {
            "actor": (0.0, 9.0, 90.0, 0.0),
            "rollout": (200.0, 0.0, 0.0, 0.0),
            "critic": (0.0, 9.0, 0.0, 90.0),
        }
        stages = work.get(model, (0.0, 9.0, 0.0, 0.0))

        def seconds(cut: int) -> Seconds:
            a, b, c, d = (1e3 * one / size * cut**0.2 + 0.01 * cut * bool(one) for one in stages)
            return a, b, c, d

        return [
            Option(size, 40 / cut + 1, 8 / cut, seconds(cut))
            for cut in (1, 2, 4, 8, 16)
            if cut <= size
        ]

    before = time.process_time()
    found = search(Problem(("actor", "rollout", "critic", "reference"), 4096, sizes, 80, options))
    assert found is not None and time.process_time() - before < 10
