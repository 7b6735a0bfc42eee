"""Entries of `benchmarks/`: one runs here in seconds, and one without its peer takes no figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridflow.bench.measurements.base import SUITES, Place, find
from hybridflow.bench.result import read
from hybridflow.cli.main import main
from hybridflow.errors import ConfigError

pytestmark = pytest.mark.slow  # starts processes


def test_conversations_are_measured_with_their_yardstick_and_the_limit_of_memory(
    tmp_path: Path,
) -> None:
    assert main(["bench", "run", "conversations", "count=64", "--out", str(tmp_path)]) == 0
    found = read(tmp_path / "result.json")
    rate, memory = found.metrics
    assert found.suite == "conversations" and not found.not_run
    assert (rate.unit, rate.better, len(rate.rounds)) == ("requests/s", "higher", 5)
    assert rate.yardstick is not None and len(rate.yardstick.rounds) == 5 and rate.value > 0
    assert memory.share is not None and memory.share > 1
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("peer=/nowhere/python", "peer=/nowhere/python: no such Python; nothing was measured"),
        ("case=tiny-9", "case=tiny-9 sides=TRL,2+2: cases are tiny-8, tiny-8-reference"),
        ("sides=TRL,3+3", "sides are TRL, in-process, 1+1, 2+2"),
    ],
)
def test_steps_beside_trl_need_trl_and_a_known_case(tmp_path: Path, setting: str, why: str) -> None:
    place = Place("", ("",), tmp_path, tmp_path)
    with pytest.raises(ConfigError) as raised:
        list(find("trl_steps").measure(place, [setting]))
    assert why in str(raised.value)


def test_every_command_that_the_documents_quote_names_an_entry_and_its_settings() -> None:
    root = Path(__file__).resolve().parents[2]
    documents = [*root.glob("docs/**/*.md"), root / "README.md", root / "kernels" / "LOG.md"]
    quoted = re.compile(
        r'make\s+bench\s+NAME=(\w+)(?:\s+ARGS="([^"]*)")?|hybridflow\s+bench\s+run\s+(\w+)'
        r"((?:\s+\w+=\w+)*)"
    )
    found = set()
    for document in documents:
        for name, words, entry, settings in quoted.findall(document.read_text(encoding="utf-8")):
            found.add((name or entry, words or settings))
    suites = {name for name, _ in found if name in SUITES}
    assert suites >= {"preflight", "micro"} and len(found) > 10
    for name, words in found:
        if name not in SUITES and name not in ("NAME", "my", "SUITE"):
            find(name).settings(words.split())
