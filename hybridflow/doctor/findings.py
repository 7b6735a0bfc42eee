"""A line of the doctor's table, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "unused", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the table. `remedy` is empty where nothing is to be done."""

    topic: str
    level: Level
    what: str
    remedy: str = ""


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something would end a run."""
    return int(any(finding.level == "error" for finding in findings))


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, with the remedy under each line that has one."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8}{finding.topic:<{width}}  {finding.what}")
        if finding.remedy:
            lines.append(f"{'':<8}{'':<{width}}  -> {finding.remedy}")
    counts = {}
    for level in ("error", "warning"):
        counts[level] = sum(finding.level == level for finding in findings)
    return "\n".join([*lines, f"{counts['error']} error(s), {counts['warning']} warning(s)"])
