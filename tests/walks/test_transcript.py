"""The walker of transcripts sees what differs, and no transcript of a document goes unwalked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.walks.package import ROOT
from tests.walks.transcript import Command, Walk


def test_numbers_and_what_is_left_out_may_differ_and_nothing_else(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    walk.run(
        Command("echo took 3.5 s; echo; echo a; echo b; echo end", "took 12 s\n\n[...]\nend\n")
    )
    walk.run(Command("echo job 777123 of 777123: 0:11", "job 64255 of 64255: 0:02\n"))
    walk.run(Command("echo 64255.out", "64255.out\n"))
    assert walk.numbers == {"64255": "777123"}
    walk.run(
        Command(
            "echo 'hybridflow: no such file x.y' >&2; exit 2", "hybridflow: no such file [...]\n"
        )
    )
    walk.run(Command("echo one \\\n  two", "one two\n"))
    for text, shown in (
        ("echo took 3.5 min", "took 12 s\n"),
        ("echo a; echo b", "a\n"),
        ("true", "a\n"),
        ("echo a", ""),
        ("echo 7", "64255\n"),
        ("echo 777123 of 777124", "55555 of 55555\n"),
        ("echo b1", "b2\n"),
        ("echo a; exit 1", "a\n"),
        ("echo hybridflow: wrong", "hybridflow: wrong\n"),
    ):
        with pytest.raises(AssertionError):
            walk.run(Command(text, shown))


def test_every_transcript_of_the_documents_is_walked() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        str(path.relative_to(ROOT))
        for path in documents
        if "```console\n" in path.read_text(encoding="utf-8")
    }
    tests = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")
    )
    assert shown == set(re.findall(r'(?:walk|follow)\(\s*"([\w/-]+\.md)"', tests))
