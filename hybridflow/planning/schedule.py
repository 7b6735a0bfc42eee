"""The schedule of a step's phases. Device pools work concurrently, while the phases on one pool run
one after another. An actual run follows the same schedule (`trainer.run`, `trainer.devices`).
Forward passes that the advantages depend on start once all responses are complete, and end before
any update. The next generation waits for the policy's update and for all work on the policy's and
the engines' devices. An update on other devices (the critic's) may overlap the next generation and
ends before the next passes on these devices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

# a pool's seconds per stage: generation, passes before advantages, the policy's update, other
# updates
Seconds = tuple[float, float, float, float]
Stage = Literal["generation", "preparation", "update", "rest"]
_STEPS = 4  # a steady state is reached with the second step


class Timed(NamedTuple):
    """A phase of a step.

    Attributes:
        devices: section whose device pool it uses.
        stage: stage of the step. `rest` follows the updates, on the policy's and engines' devices.
    """

    seconds: float
    devices: str
    stage: Stage


def step_seconds(pools: Sequence[Seconds], overlaps: bool, rest: float = 0.0) -> float:
    """Return the seconds per step in steady state.

    Args:
        overlaps: if True, generation runs concurrently with training on older samples, except in
            pools used by both.
        rest: seconds between the updates and the next generation.
    """
    generation = max(pool[0] for pool in pools)
    prepared = max(pool[1] for pool in pools)
    apart = 0.0
    trained = 0.0
    waited = 0.0
    for generates, prepares, actor, others in pools:
        update = actor + others
        apart = max(apart, prepares + update)
        if actor:
            trained = max(trained, update)
        if actor or generates:
            waited = max(waited, update)
    if overlaps:
        return max(generation, prepared + trained + rest, apart, *map(sum, pools))
    return max(generation + prepared + waited + rest, apart)


def begins(phases: Sequence[Timed], engines: str) -> list[float]:
    """Return each phase's start in steady state, in seconds from the start of the step's
    generation.

    Args:
        phases: phases of the same stage must be in the order in which they are requested.
        engines: the engines' pool.
    """
    if not all(math.isfinite(phase.seconds) for phase in phases):
        return [0.0] * len(phases)
    free = defaultdict[str, float](float)
    end = 0.0
    found: list[float] = []
    for _ in range(_STEPS):
        origin = max(end, free[engines], free["actor"])
        at = dict[int, float]()
        end = origin
        for stage in ("generation", "preparation", "update", "rest"):
            barrier = end
            for number, phase in enumerate(phases):
                if phase.stage != stage:
                    continue
                held = {engines, "actor"} if stage == "rest" else {phase.devices}
                start = max(barrier, *(free[pool] for pool in held))
                at[number] = start - origin
                free.update(dict.fromkeys(held, start + phase.seconds))
                if stage != "update" or phase.devices in (engines, "actor"):
                    end = max(end, start + phase.seconds)
        found = [at[number] for number in range(len(phases))]
    return found
