"""How many threads each process computes with where there is no GPU."""

from __future__ import annotations

import os

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig

_RANKS = ("actor", "critic", "reference", "reward_model", "teacher")


def threads_by_role(config: RunConfig, cores: int, most: int | None = None) -> dict[str, int]:
    """Threads of a rank of each role, and of each rank of an engine (`rollout`).

    Roles take turns: engines wait while ranks compute, ranks while engines do, and the ranks of one role while
    another's do. So the processes of one role share all cores, and no core has two threads at once. The number of
    threads decides in which order sums are added, and so the last bits of a run.

    Args:
        config: of a run on one machine.
        cores: of that machine; 1 where GPUs compute or other machines do, whose processes have one thread each.
        most: that the user allows a process (`user_limit`); None: no limit.
    """
    processes = {role: derived.role_world_size(config, role) for role in _RANKS}
    processes["rollout"] = config.rollout.num_engines * derived.engine_ranks(config)
    return {role: max(1, min(cores // count, most or cores)) for role, count in processes.items()}


def user_limit() -> int | None:
    """OMP_NUM_THREADS of this process's environment; None where it is not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(first) if first.isdigit() and int(first) else None


def describe(config: RunConfig, cores: int, job: str) -> str:
    """The threads of the roles of a job, as `--explain` shows them."""
    threads = threads_by_role(config, cores, user_limit())
    roles = [*derived.roles_in_use(config, job), *(["rollout"] if job == "train" else [])]
    found = ", ".join(f"{role} {threads[role]}" for role in roles)
    limit = f"; at most OMP_NUM_THREADS={user_limit()}" if user_limit() else ""
    return f"Threads of a process: {found}; {cores} cores, which a role's processes share while others wait{limit}"
