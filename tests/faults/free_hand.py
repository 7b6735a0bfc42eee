"""Disturbances that no seed draws: several at once, one after another, and of the places that a run
writes to."""

from __future__ import annotations

from tests.faults.faults import (
    CHECKPOINTS_REMOVED,
    KILL,
    KILL_TWO,
    NO_INODES,
    NO_RIGHTS,
    NO_SHARED_MEMORY,
    PAUSE,
    SAVE_REMOVED,
    Fault,
)

_DRIVER = ("driver",)
# the shape, and what happens to it
CAMPAIGNS: tuple[tuple[str, tuple[Fault, ...]], ...] = (
    (
        "TP 2, PP 2, EP 2",
        (
            Fault(KILL_TWO, "gen", 1, victims=("actor rank 0", "actor rank 3")),
            Fault(KILL_TWO, "update_actor", 2, victims=("actor rank 1", "actor rank 2")),
            Fault(KILL_TWO, "update_weights", 4, victims=("actor rank 3", "rollout worker")),
            Fault(KILL_TWO, "save_checkpoint", 5, victims=("actor rank 0", "driver")),
            Fault(KILL_TWO, "gen", 6, victims=("engine scheduler", "raylet")),
            Fault(KILL_TWO, "old_log_prob", 7, victims=("gcs", "actor rank 1")),
        ),
    ),
    (
        "one process",
        (
            Fault(PAUSE, "start_ranks", 0, victims=("raylet",)),
            Fault(PAUSE, "gen", 1, victims=("raylet",)),
            Fault(PAUSE, "update_actor", 2, victims=("gcs",)),
            Fault(PAUSE, "save_checkpoint", 3, victims=("raylet",)),
            Fault(PAUSE, "gen", 4, victims=("engine scheduler",)),
            Fault(PAUSE, "update_actor", 5, victims=("actor rank 0",)),
            Fault(PAUSE, "update_weights", 6, victims=("rollout worker",)),
            Fault(PAUSE, "reward", 7, victims=("reward process",)),
        ),
    ),
    (
        "one process",
        (
            Fault(NO_SHARED_MEMORY, "gen", 2),
            Fault(NO_INODES, "save_checkpoint", 3),
            Fault(NO_SHARED_MEMORY, "update_weights", 5),
            Fault(NO_INODES, "gen", 6),
            Fault(NO_SHARED_MEMORY, "start_ranks", 0),
        ),
    ),
    (
        "own critic",
        (
            Fault(SAVE_REMOVED, "save_checkpoint", 2, 0.0),
            Fault(NO_RIGHTS, "gen", 3),
            Fault(NO_RIGHTS, "save_checkpoint", 4),
            Fault(CHECKPOINTS_REMOVED, "gen", 5),
            Fault(SAVE_REMOVED, "save_checkpoint", 6, 0.0),
        ),
    ),
    (
        "own critic",
        (
            Fault(KILL, "gen", 2, victims=_DRIVER),
            Fault(KILL, "start_ranks", 0, victims=_DRIVER),
            Fault(KILL, "plan_the_sync", 0, victims=_DRIVER),
            Fault(KILL, "save_checkpoint", 4, victims=_DRIVER),
            Fault(KILL, "start_Ray", 0, victims=_DRIVER),
            Fault(KILL, "wait_for_the_engines", 0, victims=_DRIVER),
            Fault(KILL, "update_actor", 6, victims=_DRIVER),
            Fault(KILL, "export", 0, victims=_DRIVER),
        ),
    ),
)
