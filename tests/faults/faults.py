"""What may be done to a run, to which of its processes, and when: drawn by a seed over the whole
product."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.faults.shapes import STEPS

KILL = "SIGKILL"
STOP = "SIGSTOP"
FULL = "disk full"
READ_ONLY = "read-only"
DAMAGED = "damaged checkpoint"
NO_MEMORY = "out of memory"
SLOW = "disk stands still"
# by hand (`free_hand.py`), not drawn
KILL_TWO = "SIGKILL of two"
PAUSE = "SIGSTOP, then SIGCONT"
NO_SHARED_MEMORY = "shared memory full"
NO_INODES = "no inodes left"
NO_RIGHTS = "folder not writable"
SAVE_REMOVED = "unfinished checkpoint removed"
CHECKPOINTS_REMOVED = "all checkpoints removed"
OF_PROCESSES = (KILL, STOP, NO_MEMORY, KILL_TWO, PAUSE)
STARTING = (
    "start_Ray",
    "start_engine_workers",
    "start_ranks",
    "warm_start",
    "wait_for_the_engines",
    "plan_the_sync",
)
PHASES = (
    "gen",
    "reward",
    "old_log_prob",
    "adv",
    "update_actor",
    "update_weights",
    "testing",
    "save_checkpoint",
)
ENDING = ("export", "shutdown")
COMMON = (
    *(
        "driver",
        "actor rank 0",
        "rollout worker",
        "engine guard",
        "engine main",
        "engine scheduler",
        "cluster guard",
    ),
    *("gcs", "raylet", "agent", "reward host", "reward process"),
)
MORE = {
    "own critic": ("critic rank 0", "reference rank 0"),
    "TP 2, PP 2, EP 2": ("actor rank 1", "actor rank 2", "actor rank 3"),
    "two engines": ("second engine's scheduler", "second engine's guard"),
    "fsdp": ("actor rank 1",),
    "distill": ("teacher rank 0",),
    "safe rlhf": ("cost_critic rank 0",),
    "own flow": ("actor rank 1", "actor rank 2", "actor rank 3"),
}


@dataclass(frozen=True)
class Fault:
    """One disturbance.

    Attributes:
        kind: one of the constants above.
        moment: a stage of the start, a phase of a step, or part of the end.
        step: of the phase; 0 outside of steps.
        part: 0 to 1, how far into the moment.
        victims: processes by name; the first that runs then is it, or the first two.
        draw: what is left to chance later: the byte that is damaged.
    """

    kind: str
    moment: str
    step: int
    part: float = 0.5
    victims: tuple[str, ...] = ()
    draw: float = 0.0

    @property
    def title(self) -> str:
        """One line about it."""
        at = f"{self.moment} {self.step}" if self.step else self.moment
        named = self.victims[:2] if self.kind == KILL_TWO else self.victims[:1]
        whom = f" {' and '.join(named)}" if named else ""
        return f"{self.kind}{whom} at {self.part:.2f} of {at}"


# the covering part that `make test-full` plays: one of each way back, in one campaign without a
# second start of the driver
COVERING = (
    Fault(KILL, "gen", 1, 0.5, ("engine scheduler",), 0.0),
    Fault(KILL, "update_actor", 2, 0.5, ("actor rank 0",), 0.0),
    Fault(KILL, "update_weights", 3, 0.5, ("rollout worker",), 0.0),
    Fault(KILL, "old_log_prob", 4, 0.5, ("gcs",), 0.0),
    Fault(STOP, "gen", 6, 0.5, ("engine scheduler",), 0.0),
)


def two_kills(shape: str, seed: int) -> list[Fault]:
    """A rank of a role that the shape has besides the policy (or else the policy's), and the
    driver, are killed at moments of two different steps, in either order."""
    chance = random.Random(f"two kills of {shape}, {seed}")
    ranks = [name for name in MORE.get(shape, ()) if " rank " in name]
    rank = chance.choice(ranks or ["actor rank 0"])
    victims = chance.sample([rank, "driver"], 2)
    steps = (chance.randrange(2, STEPS // 2 + 1), chance.randrange(STEPS // 2 + 1, STEPS))
    return [
        Fault(KILL, possible(chance.choice(PHASES), step), step, chance.random(), (victim,), 0.0)
        for victim, step in zip(victims, steps, strict=True)
    ]


def draw(shape: str, seed: int, disks: bool, memory: bool) -> list[Fault]:
    """The disturbances of a campaign in the order of their moments: one while it starts, one in
    every step but the last, one at its end.

    Args:
        disks: whether the run has a file system of its own, which may fill up and stand still.
        memory: whether the memory of a process can be limited.
    """
    chance = random.Random(f"{shape} {seed}")
    places = [
        (chance.choice(STARTING), 0),
        *((chance.choice(PHASES), step) for step in range(1, STEPS)),
    ]
    places.append((chance.choice(ENDING), 0))
    places = [(possible(name, step), step) for name, step in places]
    faults = []
    for moment, step in places:
        kinds = (KILL, KILL, KILL, STOP, STOP, DAMAGED) + ((FULL, READ_ONLY, SLOW) if disks else ())
        kinds += (NO_MEMORY,) if memory else ()
        kind = chance.choice(kinds)
        if kind == DAMAGED and step < 2:
            kind = KILL  # there is no checkpoint yet
        victims = [*COMMON, *MORE.get(shape, ())]
        chance.shuffle(victims)
        whom = tuple(victims) if kind in OF_PROCESSES else ()
        faults.append(Fault(kind, moment, step, chance.random(), whom, chance.random()))
    return faults


def possible(moment: str, step: int) -> str:
    """A validation comes after every fourth step alone."""
    return "update_weights" if moment == "testing" and step % 4 else moment
