"""Published figures of other systems: the documents quote those of the data file, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.reshard_plan import CASES
from benchmarks.support.published import PUBLISHED, sync_seconds

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(document: str, head: str) -> list[list[str]]:
    """Cells of the first table of a document whose head begins with these cells."""
    lines = (DOCS / document).read_text(encoding="utf-8").split(head, 1)[1].splitlines()[2:]
    table = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_syncs_has_the_published_seconds() -> None:
    found = {}
    for system, _, time, _ in rows("reshard.md", "| System | Sync | Time |"):
        found[system] = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", time)}
    expected = {}
    for system, models in PUBLISHED["syncs"].items():
        expected[system] = {float(seconds) for values in models.values() for seconds in values}
    assert found == expected


def test_the_tables_of_placements_have_the_statements_of_the_paper() -> None:
    stated = {}
    for actor, critic, by_devices in PUBLISHED["placements"]["fastest"]:
        for devices, placement in by_devices.items():
            stated[f"{actor}, {critic}", str(devices)] = placement or "-"
    # the first table has the settings of which the paper says something
    head = "| actor, critic | A100 |"
    found = {
        (row[0], row[1]): row[-1].removesuffix(" (differs)") for row in rows("planning.md", head)
    }
    assert found == {key: value for key, value in stated.items() if value != "-"}


def test_every_case_of_a_plan_that_names_a_system_has_its_figure() -> None:
    named = [case for case in CASES if case.published]
    assert len(named) >= 4
    for case in named:
        assert case.published and sync_seconds(case.published, case.model) > 0
