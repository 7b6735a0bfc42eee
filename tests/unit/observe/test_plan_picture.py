"""Pictures of a plan: bars as long as what they show, and pages with them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.main import main
from hybridflow.observe.plan_picture import pictures
from hybridflow.observe.report import write_report

PHASES: list[dict[str, Any]] = [
    {"name": "generation", "seconds": 30.0, "memory": {"engine weights": 20e9, "KV cache": 40e9}},
    {"name": "update actor", "seconds": 10.0, "memory": {"actor weights": 20e9}},
    {"name": "checkpoint", "seconds": 0.0, "memory": {}},
]


def bars(svg: str) -> list[tuple[float, float, str]]:
    """(left, width, colour) of each."""
    found = re.findall(
        r'class="bar" x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="[\d.]+" fill="([^"]+)"', svg
    )
    return [(float(left), float(width), color) for left, width, color in found]


def test_bars_are_as_long_as_bytes_and_seconds() -> None:
    memory, schedule = pictures(PHASES, 80e9, {})
    cache, weights, actor = bars(memory.svg)  # the largest part first
    assert cache[1] == pytest.approx(2 * weights[1], abs=0.3) and actor[1] == pytest.approx(
        weights[1], abs=0.3
    )
    assert weights[0] == pytest.approx(cache[0] + cache[1], abs=0.3)
    assert {label: color for label, color, _ in memory.legend}["KV cache"] == cache[2]
    assert "80 GB per device" in memory.svg and "checkpoint" not in memory.svg
    first, second, third = bars(schedule.svg)
    # a phase is never lost
    assert first[1] == pytest.approx(3 * second[1], abs=0.3) and third[1] == 1
    assert second[0] == pytest.approx(first[0] + first[1], abs=0.3)


def test_measured_phases_stand_below_the_planned_ones() -> None:
    schedule = pictures(PHASES, 80e9, {"generation": 40.0})[1]
    planned, measured, *_ = bars(schedule.svg)
    assert measured[1] == pytest.approx(planned[1] * 4 / 3, abs=0.3)
    assert [label for label, _, _ in schedule.legend] == ["planned", "measured"]


@pytest.mark.parametrize("seconds", [0.25, 50.0, 12499.0])
def test_the_figures_behind_the_bars_end_within_the_picture(seconds: float) -> None:
    measured = {"generation": 2 * seconds, "update actor": 2 * seconds}
    schedule = pictures([{**phase, "seconds": seconds} for phase in PHASES], 80e9, measured)[1]
    found = re.findall(r'class="value" x="([\d.]+)" y="[\d.]+">([^<]+)<', schedule.svg)
    assert len(found) == 3 and sum(" | " in text for _, text in found) == 2
    assert all(float(left) + 7.5 * len(text) <= 560 for left, text in found)


def test_a_device_far_larger_than_the_job_does_not_hide_it() -> None:
    assert "a device" not in pictures(PHASES, 8e12, {})[0].svg


def test_a_phase_without_a_finite_time_is_left_out_of_the_schedule() -> None:
    endless = {"name": "generation", "seconds": math.inf, "memory": {"engine weights": 20e9}}
    memory, schedule = pictures([endless, PHASES[1]], 80e9, {})
    assert (
        "generation" in memory.svg
        and "generation" not in schedule.svg
        and len(bars(schedule.svg)) == 1
    )


def test_many_parts_share_the_last_colour() -> None:
    parts = {f"part {number}": 1e9 * (20 - number) for number in range(12)}
    memory = pictures([{"name": "one", "seconds": 1.0, "memory": parts}], 1e12, {})[0]
    assert len(memory.legend) == 9 and memory.legend[-1][0] == "part 8, part 9, part 10, part 11"


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "--config-name", "grpo-qwen3-8b-1x8", "--html", str(page)]) == 0
    text = page.read_text()
    assert (
        "Planned memory" in text
        and "Schedule of a step" in text
        and capsys.readouterr().out.splitlines()[0] in text
    )


@pytest.mark.parametrize(
    "planned", [None, 1, {}, {"unknown": "no sizes"}, {"seconds": {}, "plan": {"phases": 3}}]
)
def test_a_run_without_a_readable_plan_has_a_report(tmp_path: Path, planned: object) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"planned": planned}))
    assert "Planned memory" not in write_report(tmp_path).read_text()


def test_the_report_of_a_run_shows_its_plan(tmp_path: Path) -> None:
    seconds = {
        "generation": {"planned": 30.0, "measured": 33.0},
        "step": {"planned": 40.0, "measured": None},
    }
    planned = {"seconds": seconds, "plan": {"phases": PHASES, "device_bytes": 80e9}}
    (tmp_path / "summary.json").write_text(json.dumps({"planned": planned}))
    text = write_report(tmp_path).read_text()
    assert "Planned memory" in text and "30.0 s | 33.0 s" in text
    assert "planned.seconds.generation.measured" in text and "planned.plan" not in text
