"""When the phases of a step run: pools of devices work at the same time, the phases of a pool one
after another.

A run does the same (`trainer.run`, `trainer.devices`). Passes before advantages begin
when all answers are there and end before any update. The next answers wait for the policy's update,
and for everything on the policy's and the engines' devices; an update on other devices (the
critic's) lasts into the next generation and ends before the next passes on these devices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

# seconds of a pool of devices in each stage: generation, passes before advantages, the policy's
# update, other updates
Seconds = tuple[float, float, float, float]
Stage = Literal["generation", "preparation", "update", "rest"]
_STEPS = 4  # from the second on they are all alike


class Timed(NamedTuple):
    """A phase.

    Attributes:
        devices: the section whose pool of devices it uses. stage: `rest` is what follows the
            updates, on the devices of policy and engines.
    """

    seconds: float
    devices: str
    stage: Stage


def step_seconds(pools: Sequence[Seconds], overlaps: bool, rest: float = 0.0) -> float:
    """A step, when many follow one another; `rest` comes between its updates and the next
    generation.

    Args:
        overlaps: generation runs beside training (of older samples), as far as no pool has work in
            both.
    """
    generation = max(pool[0] for pool in pools)
    prepared = max(pool[1] for pool in pools)
    updates = [sum(pool[2:]) for pool in pools]
    apart = max(pool[1] + update for pool, update in zip(pools, updates, strict=True))
    trained = max(
        (update for pool, update in zip(pools, updates, strict=True) if pool[2]), default=0.0
    )
    if overlaps:
        return max(generation, prepared + trained + rest, apart, *map(sum, pools))
    waited = max(
        (update for pool, update in zip(pools, updates, strict=True) if pool[0] or pool[2]),
        default=0.0,
    )
    return max(generation + prepared + waited + rest, apart)


def begins(phases: Sequence[Timed], engines: str) -> list[float]:
    """Seconds from the begin of a generation to that of each phase of its step, when many steps
    follow one another.

    Args:
        phases: those of a stage in the order in which they are asked for.
        engines: the pool of the engines.
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
