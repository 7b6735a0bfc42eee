"""Record of nodes that a preflight has excluded, so that later jobs on the site avoid them
(`site.bad_nodes`). The file has one JSON line per exclusion: node, reason, job and Unix time. A
node is used again after `limits.bad_node_hours`, or once its lines are removed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridflow.launch import records
from hybridflow.launch.site import Site

_LINES = 1000  # the last lines of the file are read
_MOST_WHY = 300
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True)
class Exclusion:
    """An excluded node: the reason, the job whose preflight excluded it, and how many hours ago
    that was.
    """

    why: str
    job: str
    hours: float


def remember(path: Path, bad: Mapping[str, str], job: str) -> str:
    """Append the excluded nodes and their problems. If the file cannot be written, returns an error
    message instead of raising, because this must not make a job fail.
    """
    lines = []
    for node, why in bad.items():
        record = {"node": node, "why": why[:_MOST_WHY], "job": job, "time": round(time.time())}
        lines.append(json.dumps(record) + "\n")
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))  # one write, so that lines of two jobs do not mix
    except OSError as error:
        return f"site.bad_nodes={path} could not be written: {error}"
    return ""


def excluded(site: Site) -> dict[str, Exclusion]:
    """Return the nodes that a new job must not use; an empty result if `site.bad_nodes` is not
    set.
    """
    if site.bad_nodes is None:
        return {}
    found = {}
    now = time.time()
    for line in records.tail(Path(site.bad_nodes), _LINES).splitlines():
        try:
            record = json.loads(line)
            node = str(record["node"])
            hours = max(now - float(record["time"]), 0.0) / 3600
            exclusion = Exclusion(str(record["why"])[:_MOST_WHY], str(record["job"]), hours)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # cut off, or edited
        if hours < site.limits.bad_node_hours and _NODE.fullmatch(node):
            found[node] = exclusion
    return found


def described(found: Mapping[str, Exclusion]) -> list[str]:
    """Return one line for each excluded node."""
    lines = []
    for node, one in found.items():
        since = f"{one.hours:.1f} hours ago, job {one.job}"
        lines.append(f"not using {node}: {one.why} ({since}; site.bad_nodes)")
    return lines
