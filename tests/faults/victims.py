"""The processes of a run by the names that the matrix gives them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.e2e.runs import Run

_BY_COMMAND = {
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
    "agent": "runtime_env/agent/main.py",
    "cluster guard": "single_controller/guard.py",
    "reward host": "hybridflow.rewards.host",
}


def find(run: Run, name: str, logs: Path) -> int | None:
    """The process id, or None when no such process runs now. `logs`: folder of the ranks' logs."""
    if name == "driver":
        return run.process.pid if run.process.poll() is None else None
    descendants = (
        psutil.Process(run.process.pid).children(recursive=True)
        if run.process.poll() is None
        else []
    )
    if " rank " in name or name == "rollout worker":
        role, _, rank = name.partition(" rank ")
        return _writer(descendants, logs / f"{role if rank else 'rollout'}-rank{rank or 0}.log")
    if name in _BY_COMMAND:
        return next((one.pid for one in descendants if _BY_COMMAND[name] in _command(one)), None)
    if name == "reward process":
        host = find(run, "reward host", logs)
        return next((one.pid for one in descendants if one.ppid() == host), None)
    number = 1 if name.startswith("second") else 0
    owner = _writer(descendants, logs / f"rollout-rank{number}.log")
    # Guard and server are forked from a preloaded process. Both have the guard's command line,
    # which names the worker; the server is the child of the guard.
    called = [one for one in descendants if f"engines/guard.py {owner} " in _command(one)]
    guard = next((one.pid for one in called if one.parent() not in called), None)
    if guard is None or name.endswith("guard"):
        return guard
    of_engine = psutil.Process(guard).children(recursive=True)
    is_scheduler = name.endswith("scheduler")
    wanted = (
        one
        for one in of_engine
        if ("scheduler" in _command(one) if is_scheduler else one.ppid() == guard)
    )
    return next((one.pid for one in wanted), None)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _writer(processes: list[psutil.Process], log: Path) -> int | None:
    """The process whose output goes to this log."""
    for process in processes:
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(
                log.resolve()
            ) and "guard.py" not in _command(process):
                return process.pid
        except OSError:
            continue  # it ended meanwhile
    return None
