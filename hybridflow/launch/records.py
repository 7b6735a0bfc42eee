"""Small JSON files in a job's folder. The job's processes use them to publish their addresses, and
the reasons why they ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHOSEN = "nodes.json"  # preflight's result: the nodes in use and their addresses, the head first
HEAD = "head.json"  # HOST:PORT of the cluster, written by the head's node
FAILED = "failed-{}.json"  # written by a node on which Ray exited, with the end of its log
DRIVER_LOG = "driver.log"  # exists once all nodes have joined and `hybridflow train` starts
NODE_LOG = "node-{}.log"  # output of the node's process and of `ray start`
ATTEMPTS = "attempts.jsonl"  # in the job's folder: how each restart ended


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)


def read(path: Path) -> dict[str, Any] | None:
    """Return the file's content; None if it does not exist or is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def failures(folder: Path) -> list[dict[str, Any]]:
    """Return the failure records of the nodes on which Ray exited during this attempt, earliest
    first.
    """
    found = filter(None, map(read, folder.glob(FAILED.format("*"))))
    return sorted(found, key=lambda value: float(value.get("time", 0.0)))


def has_later_start(folder: Path) -> bool:
    """Return True if the job has been restarted since the attempt that uses this folder."""
    restart = int(folder.name.rpartition("-")[2])
    return folder.with_name(f"restart-{restart + 1}").exists()


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a text file, or an empty string if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
