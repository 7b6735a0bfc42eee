"""The planner beside published runs: one set of constants for all of them."""

from __future__ import annotations

from pathlib import Path

from hybridflow.planning import accuracy

ROOT = Path(__file__).resolve().parents[3]


def test_memory_of_every_published_point_is_within_its_bound() -> None:
    found = [row for row in accuracy.rows() if row.kind != accuracy.TIME]
    assert len(found) >= 8
    assert [row for row in found if not row.is_within] == []


def test_times_of_all_published_points_are_within_their_bound() -> None:
    found = [row for row in accuracy.rows() if row.kind == accuracy.TIME]
    assert len(found) >= 25
    assert [(row.run, row.quantity) for row in found if not row.is_within] == []


def test_the_document_has_the_table_of_this_code() -> None:
    assert accuracy.table() in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
