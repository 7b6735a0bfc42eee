"""The navigation of the site: mkdocs.yml, with the decisions that it leaves to the folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DECISIONS = "Decisions"  # the section that gets every file of docs/adr
# Pages of the site from outside docs/, by their address in the site.
OUTSIDE = {
    "readme.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "reporting-vulnerabilities.md": "SECURITY.md",
    "examples/nim.md": "examples/nim/README.md",
}


def navigation() -> list[Any]:
    """Return the `nav` of mkdocs.yml with the decisions filled in."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return with_decisions(nav)


def with_decisions(nav: list[Any]) -> list[Any]:
    """Return a navigation whose section `Decisions` lists all files of docs/adr after its own."""
    found = []
    for entry in nav:
        [(title, value)] = entry.items() if isinstance(entry, dict) else [("", entry)]
        if title == DECISIONS:
            records = [{name: f"adr/{path.name}"} for name, path in decisions()]
            found.append({title: [*value, *records, {"Template": "adr/0000-template.md"}]})
        elif isinstance(value, list):
            found.append({title: with_decisions(value)})
        else:
            found.append(entry)
    return found


def decisions() -> list[tuple[str, Path]]:
    """Return (`0059 The run from Python`, file) of all decisions, in order."""
    found = []
    for path in sorted((DOCS / "adr").glob("[0-9]*.md")):
        title = heading(path.read_text(encoding="utf-8"))
        name = re.sub(r"^\d+[.:]\s*|`", "", title)
        if not path.name.startswith("0000"):
            found.append((f"{path.name[:4]} {name}", path))
    return found


def pages(nav: list[Any], section: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (titles from the top, page) of all entries of a navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield section, entry
            continue
        [(title, value)] = entry.items()
        if isinstance(value, str):
            yield (*section, title), value
        else:
            yield from pages(value, (*section, title))


def source(page: str) -> Path:
    """Return the file of a page of the site."""
    return ROOT / OUTSIDE[page] if page in OUTSIDE else DOCS / page


def heading(text: str) -> str:
    """Return the title of a page."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1] if found else ""
