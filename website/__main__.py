"""Writes the generated pages, builds the site, and checks both."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from website import commands, figures, indexes, interface, keys, pictures, recipes
from website.nav import DOCS, ROOT

SITE = ROOT / "build" / "site"
PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "keys.md": keys.document,
    DOCS / "reference" / "commands.md": commands.document,
    DOCS / "reference" / "interface.md": interface.document,
    DOCS / "reference" / "recipes.md": recipes.document,
    DOCS / "adr" / "index.md": indexes.decision_list,
    **{
        DOCS / "figures" / name: (lambda figure=figure: figures.draw(figure))
        for name, figure in figures.FIGURES.items()
    },
    ROOT / "llms.txt": indexes.llms,  # the last, since it reads the others
}


def outdated() -> list[str]:
    """Return the generated files whose contents differ from what their sources give."""
    found = []
    for path, document in PAGES.items():
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != document():
            found.append(str(path.relative_to(ROOT)))
    return found


def write() -> None:
    """Write all generated files."""
    for path, document in PAGES.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document(), encoding="utf-8")


def build(site: Path) -> list[str]:
    """Build the site strictly into a folder. Returns the problems."""
    # not with --quiet, which keeps warnings from being counted
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    # no note about mkdocs 2, which is another program
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, str(site)],
        cwd=ROOT,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        said = re.findall(r"^(?:WARNING|ERROR|Aborted).*", done.stdout, re.MULTILINE)
        return said or [f"mkdocs build --strict failed: {done.stdout[-2000:]}"]
    return remote_loads(site)


class _Loads(HTMLParser):
    """Addresses that a page loads when it is opened. Links that a reader follows do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        is_loaded = tag == "link" and values.get("rel") not in ("canonical", "prev", "next")
        for name in ("src", "href", "data", "poster", "srcset"):
            if tag != "a" and (tag != "link" or is_loaded) and values.get(name):
                self.found.append(str(values[name]))
        if values.get("class") == "mermaid":  # the theme fetches its renderer
            self.found.append("//mermaid")


def remote_loads(site: Path) -> list[str]:
    """Return a line for each address of another host that a page or style sheet would load."""
    found = set()
    for path in site.rglob("*.html"):
        parser = _Loads()
        parser.feed(path.read_text(encoding="utf-8"))
        found |= {(path.name, one) for one in parser.found if re.match(r"(https?:)?//", one)}
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        addresses = re.findall(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", text)
        found |= {(path.name, one) for one in addresses}
    return [f"{name} loads {address}" for name, address in sorted(found)]


def main() -> int:
    """Run one action and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m website", description=__doc__)
    parser.add_argument("action", choices=("write", "build", "check"))
    action = parser.parse_args().action
    if action == "write":
        write()
        return 0
    if action == "build":
        write()
        print(f"website: {pictures.retake()}")
        problems = build(SITE)
    else:
        problems = [f"{name} is out of date: run make docs" for name in outdated()]
        with tempfile.TemporaryDirectory() as folder:
            problems += build(Path(folder))
    for problem in problems:
        print(f"website: {problem}", file=sys.stderr)
    if action == "build" and not problems:
        print(f"website: {SITE.relative_to(ROOT)}/index.html")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
