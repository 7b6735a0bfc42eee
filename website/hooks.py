"""Hooks of mkdocs: the decisions enter the navigation, and files outside docs/ become pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs adds only this folder

from website.commonmark import rewritten
from website.nav import OUTSIDE, ROOT, with_decisions

_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"(```.*?^ *```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_AS_FILES = (
    "examples",
    "launch",
    "configs",
    "LICENSE",
)  # linked files from here are copied into the site


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the section of decisions."""
    config.nav = with_decisions(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, llms.txt, and the files that pages link to."""
    for page, name in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "llms.txt", abs_src_path=str(ROOT / "llms.txt")))
    for file in sorted(_linked_files()):
        address = str(file.relative_to(ROOT))
        files.append(File.generated(config, address, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to files outside docs/ at their pages of the site, and rewrite the text for
    Python-Markdown."""
    parts = _CODE.split(markdown)
    address = page.file.src_uri
    parts[::2] = [_LINK.sub(lambda link: _relinked(link, address), part) for part in parts[::2]]
    return rewritten("".join(parts))


def _relinked(link: re.Match[str], page: str) -> str:
    target = _in_repository(page, link[2])
    pages = {name: address for address, name in OUTSIDE.items()}
    if target in pages:
        address = pages[target]
    elif target.startswith("docs/"):
        address = target.removeprefix("docs/")
    else:
        address = target
    folder = str(PurePosixPath(page).parent)
    return f"{link[1]}{relpath(address, folder)}{link[3]}"


def _in_repository(page: str, link: str) -> str:
    """Return the path of a link's target from the root of the repository."""
    file = OUTSIDE.get(page, f"docs/{page}")
    return normpath(str(PurePosixPath(file).parent / link))


def _linked_files() -> set[Path]:
    """Return the files of the repository, other than pages, that pages of the site link to."""
    found = set()
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in OUTSIDE.values())]
    for document in documents:
        for link in _LINK.findall(document.read_text(encoding="utf-8")):
            target = (document.parent / link[1]).resolve()
            inside = target.is_relative_to(ROOT) and target.is_file()
            if inside and target.relative_to(ROOT).parts[0] in _AS_FILES and target.suffix != ".md":
                found.add(target)
    return found
