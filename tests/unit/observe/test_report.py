"""The HTML report: of whole, partial, empty and hostile run folders."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hybridflow.observe import scale
from hybridflow.observe.charts import MAX_BARS, MAX_POINTS, Chart, Drawn, Series, draw, thin
from hybridflow.observe.report import write_report
from hybridflow.observe.report_charts import chart_groups, step_phases
from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.run_folder import load_run
from hybridflow.observe.run_samples import pick_rows
from hybridflow.observe.timeline import Timeline
from hybridflow.observe.tracker import Tracker

CONFIG = """\
name: demo
actor: {parallel: {tensor: 2, pipeline: 1, context: 1, expert: 2}}
cluster: {nodes: 1, procs_per_node: 4}
rollout: {num_engines: 2, tensor: 1, logprob_diff_bound: 0.01}
trainer: {total_steps: 30}
sft: {steps: 12}
"""


def drawn(chart: Chart) -> Drawn:
    result = draw(chart)
    assert result is not None
    return result


def polylines(svg: str, kind: str = "line") -> list[list[tuple[float, float]]]:
    found = re.findall(rf'<polyline class="{kind}" points="([^"]*)"', svg)
    return [
        [(float(a), float(b)) for a, b in (pair.split(",") for pair in text.split())]
        for text in found
    ]


def whole_run(run: Path, steps: int = 30) -> None:
    (run / "config.yaml").write_text(CONFIG)
    with Tracker(run, ("jsonl",)) as tracker:
        for step in range(1, 13):
            tracker.log(step, {"sft/loss": 3.0 / step, "sft/grad_norm": 1.0, "sft/lr": 1e-3}, "sft")
        tracker.log(0, {"val/score": 0.125, "val/accuracy": 0.125}, "val")
        for step in range(1, steps + 1):
            timing = {"timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/step": 4.0}
            lengths = {f"response_length/{name}": 5.0 for name in ("mean", "max", "clip_ratio")}
            policy = {
                f"actor/{name}": 0.1 for name in ("ppo_kl", "ref_kl", "entropy", "grad_norm", "lr")
            }
            difference = {"rollout/logprob_diff/mean": 1e-6, "rollout/logprob_diff/max": 1e-4}
            tracker.log(
                step, {"critic/score/mean": step / 30, **timing, **lengths, **policy, **difference}
            )
        tracker.log(steps, {"val/score": 0.75, "val/accuracy": 0.75}, "val")
    with Timeline(run / "timeline.jsonl").phase("start engines"):
        pass
    for step in (1, 2, 3):
        dump_rollouts(
            dump_path(run / "rollouts", step),
            {
                "prompt_text": [f"p{i}" for i in range(9)],
                "response_text": [f"r{i}" for i in range(9)],
                "score": [i / 8 for i in range(9)],
            },
        )
    dump_rollouts(dump_path(run / "validation", 0), {"response_text": ["v"], "score": [1.0]})
    (run / "summary.json").write_text(
        json.dumps({"status": "finished", "score_before": 0.125, "score_after": 0.75, "seed": 1})
    )
    (run / "environment.json").write_text(
        json.dumps({"python": "3.11", "packages": {"torch": "2"}})
    )


class Page(HTMLParser):
    """Complains about tags that are not closed in order, and collects text."""

    VOID = frozenset({"meta", "br", "col", "line", "rect", "circle", "polyline"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_of_a_whole_run_tells_its_story_and_loads_nothing(tmp_path: Path) -> None:
    whole_run(tmp_path)
    html = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(html)
    for piece in (
        "demo",
        "finished",
        "12.5 % → 75.0 %",
        "30 of 30",
        "after 12 SFT steps",
        "TP2 EP2 DP2",
        "start engines",
        "packages.torch",
    ):
        assert piece in page.text
    for title in (
        "Held-out accuracy",
        "Warm start (SFT) loss",
        "KL divergence",
        "Entropy",
        "Gradient norm",
        "Learning rate",
        "Step time by",
    ):
        assert title in page.text
    assert "Not in this report" not in page.text
    assert "://" not in html
    assert not [
        tag for tag, attrs in page.tags if {"src", "href", "srcset"} & attrs.keys() or tag == "link"
    ]
    assert not list(tmp_path.glob(".report*"))


def test_no_script_runs_in_the_page_but_its_own(tmp_path: Path) -> None:
    whole_run(tmp_path)
    pages = [write_report(tmp_path).read_text(encoding="utf-8") for _ in range(2)]
    nonces = []
    for page in pages:
        (policy,) = re.findall(
            r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page
        )
        (nonce,) = re.findall(r"script-src 'nonce-([\w-]{20,})'", policy)
        assert "default-src 'none'" in policy and page.index(
            "Content-Security-Policy"
        ) < page.index("<style")
        assert (
            re.findall(r"<script[^>]*>", page) == [f'<script nonce="{nonce}">']
            and " onclick" not in page
        )
        nonces.append(nonce)
    assert nonces[0] != nonces[1]


def test_charts_hold_as_many_points_as_steps(tmp_path: Path) -> None:
    whole_run(tmp_path)
    charts = {
        chart.title: chart for _, group in chart_groups(load_run(tmp_path)) for chart in group
    }
    (entropy,) = polylines(drawn(charts["Entropy of the policy"]).svg)
    assert len(entropy) == 30
    reward = drawn(charts["Reward, mean of the batch"]).svg
    assert [len(line) for line in polylines(reward, "raw") + polylines(reward, "trend")] == [30, 30]
    assert [len(line) for line in polylines(drawn(charts["Log-probability difference"]).svg)] == [
        30,
        30,
    ]
    accuracy = drawn(charts["Held-out accuracy"]).svg
    assert len(polylines(accuracy)[0]) == 2
    assert "before 12.5 %" in accuracy
    assert "after 75.0 %" in accuracy
    time_chart = drawn(charts["Step time by phase"])
    assert [label for label, _, _ in time_chart.legend] == ["gen", "update_actor", "other"]
    assert time_chart.svg.count('class="bar"') == 3 * 30


def test_an_empty_folder_has_a_report_that_says_so(tmp_path: Path) -> None:
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    for name in (
        "config.yaml",
        "summary.json",
        "environment.json",
        "metrics.jsonl",
        "timeline.jsonl",
        "rollouts/",
        "validation/",
    ):
        assert name in text
    assert "not finished" in text
    assert "the run was killed, or is still running" in text


def test_a_killed_run_is_reported_from_what_there_is(tmp_path: Path) -> None:
    whole_run(tmp_path, steps=3)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "environment.json").write_text('{"python": ')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "phase": "train", "wall_time": 9e9, "critic/sc')
    dump_path(tmp_path / "rollouts", 3).write_bytes(b"PAR1 torn")
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    for piece in (
        "not finished",
        "3 of 30",
        "12.5 % → 75.0 %",
        "environment.json: not valid JSON",
        "step_000003.parquet: not readable",
    ):
        assert piece in text
    assert "Rollouts of step 1" in text
    assert "Rollouts of step 3" not in text


def test_zero_steps_and_absent_metrics_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with Tracker(tmp_path, ("jsonl",)) as tracker:
        tracker.log(0, {"val/score": 0.5, "val/accuracy": 0.5}, "val")
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "no train step was recorded" in text
    assert "no sft step was recorded" in text
    assert "0 of 30" in text
    with Tracker(tmp_path, ("jsonl",)) as tracker:
        tracker.log(1, {"critic/score/mean": math.nan, "actor/entropy": 1.0})
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "metrics never logged in train steps: actor/ppo_kl" in text
    assert "train step 1: not finite: critic/score/mean=nan" in text


@pytest.mark.parametrize("where", ["rollout", "config", "summary", "metric", "environment"])
def test_text_of_the_run_is_escaped(tmp_path: Path, where: str) -> None:
    attack = "</pre><script>alert(1)</script><img src=x onerror='alert(2)' title=\"\x00\">"
    whole_run(tmp_path)
    if where == "rollout":
        columns = ("prompt_text", "response_text", "ground_truth", "finish_reason")
        dump_rollouts(
            dump_path(tmp_path / "rollouts", 2),
            {name: [attack] for name in columns} | {"score": [1.0]},
        )
    elif where == "config":
        (tmp_path / "config.yaml").write_text(
            f"name: {json.dumps(attack)}\nmodel: {{path: {json.dumps(attack)}}}\n"
        )
    elif where == "metric":
        (tmp_path / "timeline.jsonl").write_text(
            json.dumps({"name": attack, "step": None, "seconds": 1.0}) + "\n"
        )
        with Tracker(tmp_path, ("jsonl",)) as tracker:
            tracker.log(31, {f"timing_s/{attack.replace('/', '')}": 3.0, attack: math.nan})
    else:
        (tmp_path / f"{where}.json").write_text(
            json.dumps({attack: attack, "status": attack, "steps": attack, "wall_time_s": attack})
        )
    html = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(html)
    assert "<script>alert" not in html
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in page.tags]
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert "alert(1)" in page.text
    if where == "rollout":
        assert "\x00" not in html


def test_very_long_responses_are_cut(tmp_path: Path) -> None:
    dump_rollouts(
        dump_path(tmp_path / "rollouts", 1), {"response_text": ["x" * 100_000], "score": [None]}
    )
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert len(html) < 40_000
    assert "… 98,500 more characters" in html


def test_good_and_bad_rows_of_different_prompts_are_picked() -> None:
    rows = [{"uid": i // 4, "score": float(i % 4 == 0 or i == 1), "n": i} for i in range(12)]
    assert [row["n"] for row in pick_rows(rows)] == [0, 4, 7, 11]
    assert [
        row["n"]
        for row in pick_rows(
            [{"n": 0, "score": math.nan}, {"n": 1, "score": 0.5}, {"n": 2, "score": None}]
        )
    ] == [1, 0, 2]
    assert len(pick_rows([{"score": 0.0, "uid": 1} for _ in range(9)])) == 4


def test_a_gap_splits_the_line_and_a_lone_point_is_a_dot() -> None:
    svg = drawn(
        Chart(
            "x",
            [
                Series(
                    "a",
                    [
                        (1, 1.0),
                        (2, 2.0),
                        (3, None),
                        (4, 3.0),
                        (5, math.inf),
                        (6, 1.0),
                        (7, 2.0),
                        (8, 3.0),
                    ],
                )
            ],
        )
    ).svg
    assert [len(line) for line in polylines(svg)] == [2, 3]
    assert svg.count('class="dot"') == 6
    assert draw(Chart("x", [Series("a", [(1, None)]), Series("b", [])])) is None


def test_a_logarithmic_axis_leaves_out_zero_and_spaces_decades_evenly() -> None:
    svg = drawn(
        Chart("x", [Series("a", [(1, 0.0), (2, 1e-6), (3, 1e-5), (4, 1e-4)])], log=True)
    ).svg
    (line,) = polylines(svg)
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)


def test_long_series_are_thinned_to_means_and_say_so() -> None:
    chart = drawn(Chart("x", [Series("a", [(float(i), float(i)) for i in range(4 * MAX_POINTS)])]))
    assert len(polylines(chart.svg)[0]) == MAX_POINTS
    assert chart.remark == "Each point is the mean of 4 steps."
    assert thin([(1, 1.0), (2, None), (3, 3.0), (4, None)], 2) == [(2, 1.0), (4, 3.0)]


def test_bars_of_a_phase_that_few_steps_have_stand_on_the_others() -> None:
    every = [(float(i), 1.0) for i in range(4 * MAX_BARS)]
    chart = drawn(
        Chart("x", [Series("gen", every), Series("testing", every[::4], 1)], kind="stack")
    )
    bars = re.findall(
        r'<rect class="bar" x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)" '
        r'fill="([^"]+)"',
        chart.svg,
    )
    assert len(bars) == 2 * MAX_BARS
    tops = {x: float(y) for x, y, _, fill in bars if fill == "var(--c0)"}
    assert all(
        float(y) + float(height) == pytest.approx(tops[x], abs=0.11)
        for x, y, height, fill in bars
        if fill == "var(--c1)"
    )


def test_the_rest_of_a_step_is_other_and_nested_phases_count_once(tmp_path: Path) -> None:
    with Tracker(tmp_path, ("jsonl",)) as tracker:
        tracker.log(1, {"timing_s/gen": 2.0, "timing_s/gen/wait": 1.5, "timing_s/step": 5.0})
    phases, total = step_phases(load_run(tmp_path))
    assert phases == {"gen": [(1, 2.0)], "other": [(1, 3.0)]}
    assert total == {1: 5.0}


@pytest.mark.parametrize(("values", "overlap"), [(1.0, False), (4.0, True)])
def test_phases_that_overlap_are_said_to(tmp_path: Path, values: float, overlap: bool) -> None:
    with Tracker(tmp_path, ("jsonl",)) as tracker:
        tracker.log(
            1,
            {
                "timing_s/gen": 2.0,
                "timing_s/ref": 2.0,
                "timing_s/values": values,
                "timing_s/step": 5.0,
            },
        )
    charts = [chart for _, charts in chart_groups(load_run(tmp_path)) for chart in charts]
    [chart] = [chart for chart in charts if chart.title == "Step time by phase"]
    assert ("overlap" in chart.about) == overlap


def test_drafts_and_heads_are_drawn_by_depth(tmp_path: Path) -> None:
    with Tracker(tmp_path, ("jsonl",)) as tracker:
        for step in (1, 2, 3):
            depths = {f"engine/accepted_drafts/depth_{k}": 0.8 / k for k in (1, 2, 10)}
            shares = {"engine/accepted_drafts": 0.4, "actor/mtp/accuracy": 0.1 * step}
            tracker.log(
                step, {"engine/tokens_per_pass": 2.2, "actor/mtp/loss": 3.0} | depths | shares
            )
    groups = dict(chart_groups(load_run(tmp_path)))
    accepted, tokens, accuracy, loss = map(drawn, groups["Prediction heads"])
    labels = [label for label, _, _ in accepted.legend]
    assert labels == ["all", "depth 1", "depth 2", "depth 10"]
    assert len({color for _, color, _ in accepted.legend}) == 4
    assert "engine/accepted_drafts/depth_K" in accepted.about
    assert [len(line) for line in polylines(accepted.svg)] == [3] * 4
    assert accuracy.about == "actor/mtp/accuracy"
    assert [len(polylines(one.svg)) for one in (tokens, accuracy, loss)] == [1, 1, 1]


def test_a_run_without_heads_has_no_charts_of_them(tmp_path: Path) -> None:
    whole_run(tmp_path)
    charts = dict(chart_groups(load_run(tmp_path)))["Prediction heads"]
    assert [draw(chart) for chart in charts] == [None] * 4
    assert "Prediction heads" not in write_report(tmp_path).read_text(encoding="utf-8")


def test_step_times_come_from_the_timeline_when_no_metric_has_them(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    with timeline.phase("step", 1), timeline.phase("gen"), timeline.phase("wait"):
        pass
    phases, total = step_phases(load_run(tmp_path))
    assert "gen" in phases
    assert set(phases) <= {"gen", "other"}
    assert set(total) == {1}


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 1.0], ["0.0", "0.5", "1.0"]),
        ([0.0, 2e-6], ["0", "5e-7", "1e-6", "1.5e-6", "2e-6"]),
        ([3.0, 3.0], ["0", "1", "2", "3", "4"]),
        ([-0.02, 0.03], ["-0.02", "0.00", "0.02", "0.04"]),
        ([0, 12000], ["0", "5,000", "10,000", "15,000"]),
    ],
)
def test_axis_ticks_are_round(values: list[float], texts: list[str]) -> None:
    axis = scale.linear(values, 100, 0)
    assert [axis.text(tick) for tick in axis.ticks] == texts
    assert axis.low <= min(values)
    assert max(values) <= axis.high


def test_step_ticks_are_whole_numbers() -> None:
    assert scale.steps([1, 2, 3], 0, 100).ticks == (1, 2, 3)
    assert scale.steps([5], 0, 100).ticks == (5,)
    assert all(tick == int(tick) for tick in scale.steps(range(1, 501), 0, 100).ticks)


def test_a_report_on_a_full_disk_names_its_file(tmp_path: Path) -> None:
    (tmp_path / f".report.html.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_report(tmp_path)
    assert caught.value.filename == str(tmp_path / "report.html")
