"""The findings of `hybridflow doctor`, and the table that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "unused", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One finding, which is one line of the table. `remedy` is empty if no action is needed."""

    topic: str
    level: Level
    what: str
    remedy: str = ""


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if any finding would make a run fail, else 0."""
    return int(any(finding.level == "error" for finding in findings))


def table(findings: Sequence[Finding]) -> str:
    """Format the findings as text, each with its remedy on the next line."""
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
