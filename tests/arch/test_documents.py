"""Documents name files that exist, the two journeys stay short, and prose fits into 120 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.arch.journeys import JOURNEYS, steps

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
DOCUMENTS += sorted((ROOT / "examples").glob("*/README.md"))
DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
COLUMNS = 120


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_is_short_and_its_files_exist(journey: str) -> None:
    files = steps(journey)
    assert len(files) == len(set(files)) <= JOURNEYS[journey]
    assert [file for file in files if not (ROOT / "hybridflow" / file).is_file()] == []


def missing_files(text: str) -> list[str]:
    """Python files, and documents, that the text names in backticks or links and that do not
    exist."""
    named = re.findall(r"`(?:hybridflow/)?([\w/]+\.(?:py|md|yaml))(?::\w+)?`", text)
    rooms = {path.name for path in (ROOT / "hybridflow").iterdir() if path.is_dir()} | {
        "tests",
        "docs",
        "benchmarks",
    }
    ours = [name for name in named if name.split("/")[0] in rooms and "/" in name]
    folders = [ROOT, ROOT / "hybridflow", ROOT / "docs"]
    return [name for name in ours if not any((folder / name).exists() for folder in folders)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_files_that_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    assert missing_files(text) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_prose_fits_into_the_columns(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    long = [
        number
        for number, line in enumerate(lines, 1)
        if len(line) > COLUMNS and not line.startswith("|")
    ]
    assert long == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readmes_transcript_is_a_row_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = dict(
        re.findall(r"^held-out accuracy after step (\d+): ([\d.]+)$", readme, re.MULTILINE)
    )
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("\n## ")[1]
    table = results.partition("The system itself")[2]
    [header, _, *rows] = [line for line in table.splitlines() if line.startswith("|")]
    steps = [cell.strip() for cell in header.split("|")[2:-1]]
    accuracies = [dict(zip(steps, re.findall(r"[\d.]+", row)[1:], strict=False)) for row in rows]
    assert len(shown) >= 3
    assert any(shown.items() <= row.items() for row in accuracies)


def test_the_readme_says_where_the_command_is_before_it_uses_it() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (
        0
        < readme.find(".venv/bin/hybridflow")
        < re.search(r"^hybridflow ", readme, re.MULTILINE).start()
    )  # type: ignore[union-attr]


def test_a_decision_that_was_replaced_says_so() -> None:
    numbers = [int(path.name[:4]) for path in DECISIONS]
    assert len(numbers) == len(set(numbers))
    for path in DECISIONS:
        status = next(
            line
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.startswith("Status:")
        )
        assert re.match(r"Status: (accepted|superseded by|proposed)", status), path.name
        for link in re.findall(r"\]\(([^)]+)\)", status):
            assert (path.parent / link).exists(), path.name
