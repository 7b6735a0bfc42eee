"""Markdown as GitHub reads it, rewritten for Python-Markdown: blank lines before lists and tables,
four columns of indentation per level of a list."""

from __future__ import annotations

import re

_ITEM = re.compile(r"( *)([-*+]|\d+[.)])( +)(?=\S)")
_FENCE = re.compile(r" *(```+|~~~+)")
_DELIMITER = re.compile(r" *\|?[ :]*-{2,}[-| :]*$")


def rewritten(text: str) -> str:
    """Return the text with the same structure under Python-Markdown's rules."""
    lines = text.splitlines()
    found: list[str] = []
    offsets: list[int] = []  # columns at which the text of each open list item begins
    fence = ""
    for number, line in enumerate(lines):
        stripped = line.lstrip(" ")
        indent = len(line) - len(stripped)
        if not stripped:
            found.append("")
            continue
        previous = found[-1].strip() if found else ""
        item = None if fence else _ITEM.match(line)
        if item and not offsets and _continues(previous) and item[2] not in ("-", "*", "+", "1."):
            item = None  # a number at the start of a line of prose
        if not fence and (item or not _continues(previous) or _FENCE.match(line)):
            while offsets and indent < offsets[-1]:
                offsets.pop()
        if item:
            if previous and not offsets and not previous.startswith("#"):
                found.append("")
            moved = " " * (4 * len(offsets)) + item[2] + " " + line[item.end() :]
            offsets.append(item.end())
            found.append(moved)
            continue
        if not fence and previous and _is_table(lines, number):
            found.append("")
        opened = _FENCE.match(line)
        if opened:
            if not fence:
                fence = opened[1]
            elif stripped.startswith(fence):
                fence = ""
        extra = max(0, indent - offsets[-1]) if offsets else indent
        found.append(" " * (4 * len(offsets) + extra) + stripped)
    return "\n".join(found) + "\n"


def _continues(previous: str) -> bool:
    """Return True if a following line would belong to the same paragraph."""
    return bool(previous) and not previous.startswith(("#", "|", "```", "~~~", "<"))


def _is_table(lines: list[str], number: int) -> bool:
    """Return True if the line is a table's header."""
    following = lines[number + 1] if number + 1 < len(lines) else ""
    return lines[number].lstrip().startswith("|") and bool(_DELIMITER.match(following))
