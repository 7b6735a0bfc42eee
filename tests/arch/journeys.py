"""The two journeys of docs/design.md as lists of files."""

from __future__ import annotations

import re

from tests.arch.files import ROOT

# the most files that the document may name
JOURNEYS = {"A prompt on its way to a gradient": 30, "A weight on its way to an engine": 22}


def steps(journey: str) -> list[str]:
    """The files of a journey, in order."""
    section = (
        (ROOT / "docs" / "design.md")
        .read_text(encoding="utf-8")
        .split(f"## {journey}\n")[1]
        .split("\n## ")[0]
    )
    return [line.split("`")[1] for line in section.splitlines() if re.match(r"\d+\. ", line)]
