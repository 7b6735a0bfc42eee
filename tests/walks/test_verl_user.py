"""A launch line of verl's, brought over as docs/verl.md shows it."""

from __future__ import annotations

from pathlib import Path

from tests.walks.transcript import Walk


def test_the_page_for_users_of_verl(tmp_path: Path) -> None:
    Walk(tmp_path).walk("docs/verl.md")
