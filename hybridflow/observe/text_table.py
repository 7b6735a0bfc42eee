"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def filled(rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the rows, the first of which is the head, without the columns that are empty below
    it."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return list(zip(*columns, strict=True))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line for each row, with each column padded to a common width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines
