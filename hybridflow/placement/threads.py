"""Number of compute threads per process on machines without a GPU."""

from __future__ import annotations

import os

from hybridflow.config import derived
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import RunConfig


def threads_by_role(config: RunConfig, cores: int, most: int | None = None) -> dict[str, int]:
    """Return the number of threads per rank of each role, and per engine rank (`rollout`).

    Roles run alternately: engines wait while ranks compute, ranks wait while engines compute, and
    the ranks of one role wait for those of another. The processes of one role therefore share all
    cores without oversubscription. The number of threads determines the order of summation, and
    thus the last bits of a run's results.

    Args:
        config: configuration of a run on one machine.
        cores: number of cores on that machine; 1 if the run uses GPUs or other machines, since each
            process then gets one thread.
        most: maximum per process set by the user (`user_limit`), or None.
    """
    processes = {role: derived.role_world_size(config, role) for role in ROLES}
    processes["rollout"] = config.rollout.num_engines * derived.engine_ranks(config)
    return {role: max(1, min(cores // count, most or cores)) for role, count in processes.items()}


def user_limit() -> int | None:
    """Return OMP_NUM_THREADS from this process's environment, or None if it is not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(first) if first.isdigit() and int(first) else None


def describe(config: RunConfig, cores: int, job: str) -> str:
    """Format the thread count of each of a job's roles for `--explain`."""
    threads = threads_by_role(config, cores, user_limit())
    roles = [*derived.roles_in_use(config, job), *(["rollout"] if job == "train" else [])]
    found = ", ".join(f"{role} {threads[role]}" for role in roles)
    limit = f"; at most OMP_NUM_THREADS={user_limit()}" if user_limit() else ""
    return (
        f"Threads per process: {found}; the processes of a role share {cores} cores while other "
        f"roles wait{limit}"
    )
