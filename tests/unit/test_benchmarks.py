"""Entries of `benchmarks/`: one runs here in seconds, and one without its peer takes no figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.bench.result import read
from hybridflow.cli.main import main

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
        ("peer=/nowhere/python", "peer=/nowhere/python: no such Python; no figure was taken"),
        ("case=tiny-9", "case=tiny-9 sides=TRL,2+2: cases are tiny-8, tiny-8-reference"),
        ("sides=TRL,3+3", "sides are TRL, in-process, 1+1, 2+2"),
    ],
)
def test_steps_beside_trl_need_trl_and_a_known_case(tmp_path: Path, setting: str, why: str) -> None:
    from benchmarks.trl_steps import trl_steps
    from hybridflow.bench.measurements.base import Place, find
    from hybridflow.errors import ConfigError

    place = Place("", ("",), tmp_path, tmp_path)
    assert find("trl_steps").summary.startswith(str(trl_steps.__doc__)[:20])
    with pytest.raises(ConfigError) as raised:
        list(find("trl_steps").measure(place, [setting]))
    assert why in str(raised.value)
