"""HybridFlow's auto-mapping (arXiv 2409.19256, section 6). It chooses which models share devices,
the number of devices per pool and each model's layout, such that the step time is minimal.

The search tries every set partition of the models into pools, every allocation of devices to the
pools, and every choice of layouts that fit in memory together. It is exact: it only prunes options
that are dominated by another and branches that are slower than the best step so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import numpy as np

from hybridflow.planning.schedule import Seconds, step_seconds


@dataclass(frozen=True)
class Option:
    """A way to run a model on a given number of devices.

    Attributes:
        held: bytes per device that are permanently allocated.
        working: additional bytes per device while the model computes.
        seconds: time in each stage of a step, as in `schedule`; 0 if the model is idle.
        layout: the caller's description of the layout, returned unchanged.
    """

    devices: int
    held: float
    working: float
    seconds: Seconds
    layout: Any = None


Members = tuple[tuple[str, Option], ...]  # (model, option) of each model in a pool
Choice = tuple[Seconds, Members]  # time of a pool in each stage of a step


@dataclass(frozen=True)
class Mapped:
    """A mapping: pools as lists of (model, option), the number of devices in each pool, and the
    step time in seconds.
    """

    pools: tuple[Members, ...]
    devices: tuple[int, ...]
    seconds: float


# (model, number of devices) -> options that use at most these devices; called for `Problem.sizes`
Options = Callable[[str, int], Sequence[Option]]


@dataclass(frozen=True)
class Problem:
    """Inputs of the search.

    Attributes:
        sizes: allowed numbers of devices per pool, in ascending order.
        memory: bytes per device.
        overlaps: True if generation and training on disjoint devices run at the same time.
    """

    models: tuple[str, ...]
    devices: int
    sizes: tuple[int, ...]
    memory: float
    options: Options
    overlaps: bool = False


def partitions(models: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield all set partitions of the models."""
    if not models:
        yield []
        return
    first = models[0]
    rest = models[1:]
    for smaller in partitions(rest):
        for number, pool in enumerate(smaller):
            yield [*smaller[:number], [first, *pool], *smaller[number + 1 :]]
        yield [[first], *smaller]


def search(
    problem: Problem, placements: Iterable[Sequence[Sequence[str]]] | None = None
) -> Mapped | None:
    """Return the mapping with the shortest step, or None if nothing fits.

    Args:
        placements: set partitions of the models to try; None for all of them.
    """
    best: Mapped | None = None
    known: dict[tuple[tuple[str, ...], int], list[Choice]] = {}
    for partition in partitions(problem.models) if placements is None else placements:
        pools = [tuple(sorted(pool)) for pool in partition]
        for pool in pools:
            for size in problem.sizes:
                if (pool, size) not in known:
                    known[pool, size] = _choices(problem, pool, size)
        best = _allocate(problem, pools, known, best)
    return best


def _choices(problem: Problem, pool: Sequence[str], size: int) -> list[Choice]:
    """Return the combinations of layouts for a pool's models that fit in memory together, excluding
    those that are slower in every stage."""
    found: list[tuple[float, float, Seconds, Members]] = [(0.0, 0.0, (0.0,) * 4, ())]
    for model in pool:
        fitting = [option for option in problem.options(model, size) if option.devices <= size]
        options = _undominated(fitting, lambda one: (one.held, one.working, *one.seconds))
        grown = []
        for held, working, seconds, chosen in found:
            for option in options:
                both = held + option.held
                most = max(working, option.working)
                if both + most <= problem.memory:
                    took = _added(seconds, option.seconds)
                    grown.append((both, most, took, (*chosen, (model, option))))
        found = _undominated(grown, lambda one: (one[0], one[1], *one[2]))
    plain = [(seconds, chosen) for _, _, seconds, chosen in found]
    return _undominated(plain, lambda one: one[0])


def _added(one: Seconds, other: Seconds) -> Seconds:
    a, b, c, d = map(add, one, other)
    return a, b, c, d


def _undominated(found: list[Any], key: Callable[[Any], tuple[float, ...]]) -> list[Any]:
    """Return the Pareto-optimal elements (those with the smallest keys), sorted by key. Among
    elements with equal keys, one is kept.
    """
    if not found:
        return []
    ordered = sorted(((key(one), one) for one in found), key=lambda pair: pair[0])
    kept: list[Any] = []
    keys = np.empty((len(ordered), len(ordered[0][0])))
    for mine, one in ordered:
        if not (keys[: len(kept)] <= mine).all(axis=1).any():
            keys[len(kept)] = mine
            kept.append(one)
    return kept


def _allocate(
    problem: Problem,
    pools: Sequence[tuple[str, ...]],
    known: Mapping[tuple[tuple[str, ...], int], list[Choice]],
    best: Mapped | None,
) -> Mapped | None:
    """Search all allocations of devices to these pools, depth first. Prunes a branch once its pools
    are slower than `best`."""
    least = []
    for names in pools:
        possible = [size for size in problem.sizes if known[names, size]]
        least.append(min(possible, default=problem.devices + 1))

    def visit(
        number: int,
        left: int,
        chosen: list[tuple[int, Seconds, Members]],
        best: Mapped | None,
    ) -> Mapped | None:
        if chosen:
            bound = step_seconds([seconds for _, seconds, _ in chosen], problem.overlaps)
            if best is not None and bound >= best.seconds:
                return best  # additional pools can only make it slower
            if number == len(pools):
                sizes = tuple(size for size, _, _ in chosen)
                taken = tuple(pool for _, _, pool in chosen)
                return Mapped(taken, sizes, bound)
        spare = left - sum(least[number + 1 :])
        # large pools first, to find a short step early
        for size in reversed([size for size in problem.sizes if size <= spare]):
            for seconds, pool in known[pools[number], size]:
                best = visit(number + 1, left - size, [*chosen, (size, seconds, pool)], best)
        return best

    return visit(0, problem.devices, [], best) if sum(least) <= problem.devices else best
