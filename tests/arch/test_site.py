"""The site: every page is in the navigation, links and anchors lead somewhere, generated pages are up
to date, code in pages can be read, and nothing is loaded from the network."""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.arch.files import ROOT
from website import __main__ as main
from website import keys, recipes
from website.__main__ import outdated, remote_loads
from website.commonmark import rewritten
from website.figures import FIGURES, files_of
from website.nav import DOCS, OUTSIDE, navigation, pages, source

PAGES = sorted(DOCS.rglob("*.md"))
SIGNATURES = ("interface.md", "design.md")  # their blocks are signatures, not programs
LINKED = [*PAGES, *(ROOT / name for name in ("README.md", "AGENTS.md", *OUTSIDE.values()))]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for _, page in pages(navigation())]
    assert sorted(listed) == sorted(set(listed))
    there = {str(path.relative_to(DOCS)) for path in PAGES}
    assert there == set(listed) - set(OUTSIDE), "put the page into a section of mkdocs.yml"
    assert [name for name in listed if not source(name).is_file()] == []


def test_generated_pages_are_up_to_date() -> None:
    assert outdated() == [], "run make docs"


@pytest.mark.slow
def test_every_key_has_a_meaning() -> None:
    rows = re.findall(r"^\| `.*$", keys.document(), re.MULTILINE)
    assert len(rows) > 200
    assert [row for row in rows if row.endswith("|  |")] == [], "add a comment in the schema"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_every_step_of_its_journey(name: str) -> None:
    drawn = re.findall(
        r'class="file"[^>]*>([^<]+)<', (DOCS / "figures" / name).read_text(encoding="utf-8")
    )
    assert drawn == files_of(FIGURES[name].journey)


def prose(text: str) -> str:
    """The text without fenced blocks and code spans."""
    return re.sub(r"^( *)(```+).*?^ *\2$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    fenced = re.sub(r"^( *)(```+).*?^ *\2$", "", text, flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.+)$", fenced, re.MULTILINE):
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)|[`*]", r"\1", title)
        slug = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        number = 1
        unique = slug
        while unique in found:
            unique = f"{slug}_{number}"
            number += 1
        found.add(unique)
    return found


def broken_links(document: Path) -> list[str]:
    """Relative links of a document whose file or anchor does not exist."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            found.append(link)
    return found


def test_no_link_is_broken() -> None:
    found = {str(path.relative_to(ROOT)): broken_links(path) for path in LINKED}
    assert {name: links for name, links in found.items() if links} == {}


def test_a_broken_link_and_a_broken_anchor_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A title: `x`, y\n\n## A title: x, y\n")
    page = tmp_path / "b.md"
    page.write_text("[1](a.md#a-title-x-y_1) [2](c.md) [3](a.md#no) [4](#b)\n\n# B\n`[5](d.md)`\n")
    assert broken_links(page) == ["c.md", "a.md#no"]


def code(document: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks of a document."""
    for indent, language, body in re.findall(
        r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$",
        document.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    ):
        yield language, textwrap.dedent(body) if indent else body


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_code_can_be_parsed(document: Path) -> None:
    fences = re.findall(r"^ *```", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0, "a block is not closed, or not opened"
    for language, text in code(document):
        if language == "python" and document.name not in SIGNATURES:
            compile(text, str(document), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language == "yaml":
            yaml.safe_load(text)
        elif language == "json":
            json.loads(text)
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                shlex.split(line, comments=True)


def test_lists_and_tables_are_rewritten_and_code_is_not() -> None:
    text = (
        "Text:\n- a\n  more\n  - b\n\n    c\n  - d\n\n```\nx\n- y\n```\n"
        "1. one\n\n   two\n   ```\n   - z\n   ```\nTable:\n| a |\n|---|\n| 1 |\nrank\n0) on a line\n"
    )
    assert rewritten(text) == (
        "Text:\n\n- a\n    more\n    - b\n\n        c\n    - d\n\n```\nx\n- y\n```\n"
        "\n1. one\n\n    two\n    ```\n    - z\n    ```\nTable:\n\n| a |\n|---|\n| 1 |\nrank\n0) on a line\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo-qwen3-235b-a22b-16x8", "tiny-distill"])
def test_the_settings_of_a_recipe_are_those_that_a_run_has(name: str) -> None:
    from hybridflow.config.build import to_plain
    from hybridflow.config.load import load_config

    assert (
        list(differences(recipes.composed(ROOT / "configs", name), to_plain(load_config(name))))
        == []
    )


def differences(ours: dict, whole: dict, path: str = "") -> Iterator[str]:  # type: ignore[type-arg]
    """Keys whose values differ, but for interpolations."""
    for key, value in ours.items():
        if isinstance(value, dict) and isinstance(whole[key], dict):
            yield from differences(value, whole[key], f"{path}{key}.")
        elif "${" not in str(value) and value != whole[key]:
            yield f"{path}{key}"


@pytest.mark.slow
def test_a_warning_of_the_build_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nplugins: []\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[x](nowhere.md)\n")
    monkeypatch.setattr(main, "ROOT", tmp_path)
    assert "nowhere.md" in "".join(main.build(tmp_path / "site"))


def test_what_a_page_would_load_from_the_network_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://a.example/">x</a><link rel="canonical" href="https://b.example/">'
        '<script src="https://c.example/x.js"></script><img src="figures/x.svg">'
    )
    (tmp_path / "a.css").write_text("@import '//d.example/x.css'; .a { background: url(x.png) }")
    assert remote_loads(tmp_path) == [
        "a.css loads //d.example/x.css",
        "a.html loads https://c.example/x.js",
    ]
