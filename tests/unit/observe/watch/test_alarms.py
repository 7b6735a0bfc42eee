"""Alarms: each is raised by the run that it is about, and by no healthy one."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from hybridflow.config.keys import exists
from hybridflow.config.schema import RunConfig
from hybridflow.observe.metric_names import line_of
from hybridflow.observe.run_folder import RunFolder
from hybridflow.observe.watch.alarms import alarms, table
from hybridflow.observe.watch.query import Query
from tests.arch.files import ROOT

STEPS = 40
HEALTHY = {
    "actor/entropy": [0.6 - step / 100 for step in range(STEPS)],
    "actor/ppo_kl": [(-1) ** step * 1e-4 for step in range(STEPS)],
    "actor/ref_kl": [step / 100 for step in range(STEPS)],
    "critic/solved_groups": [0.2] * STEPS,
    "critic/unsolved_groups": [0.7] * STEPS,
    "response_length/clip_ratio": [0.05] * STEPS,
    "rollout/logprob_diff/mean": [1e-5 * (1 + step % 3) for step in range(STEPS)],
    "rollout/mismatch/ess": [0.99] * STEPS,
}


def run_of(curves: dict[str, list[float]], **config: object) -> RunFolder:
    records = [
        {
            "step": step + 1,
            "phase": "train",
            **{name: curve[step] for name, curve in curves.items()},
        }
        for step in range(STEPS)
    ]
    bound = {"rollout": {"logprob_diff_bound": 0.01}, "model": {"dtype": "float32"}}
    return RunFolder(Path("run"), metrics=records, config=bound | config)


CASES = {
    "entropy falls": ("actor/entropy", [0.6] * 30 + [0.05] * 10),
    "KL jumps": ("actor/ppo_kl", [1e-4] * 39 + [-0.02]),
    "KL jumps ": ("actor/ref_kl", [0.01] * 35 + [0.2] * 5),
    "groups all solved": ("critic/solved_groups", [0.3] * 35 + [0.85] * 5),
    "groups all failed": ("critic/unsolved_groups", [0.3] * 35 + [0.95] * 5),
    "length at the limit": ("response_length/clip_ratio", [0.0] * 35 + [0.4] * 5),
    "mismatch rises": ("rollout/logprob_diff/mean", [1e-5] * 35 + [2e-3] * 5),
    "mismatch rises ": ("rollout/logprob_diff/mean", [5.1e-3] * 40),
    "ESS falls": ("rollout/mismatch/ess", [0.9] * 35 + [0.4] * 5),
}


def test_a_healthy_run_has_no_alarm() -> None:
    assert alarms(run_of(HEALTHY)) == []
    assert alarms(RunFolder(Path("empty"))) == []


@pytest.mark.parametrize("key", CASES)
def test_an_alarm_is_raised_by_its_own_metric_and_alone(key: str) -> None:
    name, curve = CASES[key]
    found = alarms(run_of(HEALTHY | {name: curve}))
    assert [(one.key, one.metric, one.step) for one in found] == [(key.strip(), name, STEPS)]


@pytest.mark.parametrize("key", CASES)
def test_a_single_odd_step_before_the_last_raises_nothing(key: str) -> None:
    name, curve = CASES[key]
    if len(set(curve)) > 1:
        odd = [*HEALTHY[name]]
        odd[-3] = curve[-1]
        assert alarms(run_of(HEALTHY | {name: odd})) == []


def test_a_policy_that_has_solved_its_prompts_may_lose_its_entropy() -> None:
    curves = HEALTHY | {"actor/entropy": [0.6] * 30 + [0.01] * 10}
    assert [one.key for one in alarms(run_of(curves))] == ["entropy falls"]
    solved = curves | {"critic/solved_groups": [0.3] * 35 + [0.7] * 5}
    assert alarms(run_of(solved)) == []


def test_the_bound_of_bfloat16_applies_to_bfloat16() -> None:
    curves = HEALTHY | {"rollout/logprob_diff/mean": [6e-3] * STEPS}
    rollout = {"logprob_diff_bound": 0.01, "logprob_diff_bound_bfloat16": 0.1}
    assert alarms(run_of(curves, rollout=rollout, model={"dtype": "float32"}))
    assert not alarms(run_of(curves, rollout=rollout, model={"dtype": "bfloat16"}))


def test_gaps_and_missing_metrics_are_no_alarm() -> None:
    gaps = {
        name: [None if step % 2 else value for step, value in enumerate(curve)]
        for name, curve in HEALTHY.items()
    }
    assert alarms(run_of(gaps)) == []  # type: ignore[arg-type]
    for name, curve in HEALTHY.items():
        assert alarms(run_of({name: curve})) == []


def test_advice_names_settings_metrics_and_pages_that_exist() -> None:
    found = [
        alarm for name, curve in CASES.values() for alarm in alarms(run_of(HEALTHY | {name: curve}))
    ]
    keys = set()
    for alarm in found:
        assert line_of(alarm.metric) is not None
        assert Query.parse(dict(parse_qsl(urlsplit(alarm.samples).query)))[1] == []
        page, _, anchor = alarm.page.partition("#")
        titles = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        slugs = {
            re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
            for title in titles
        }
        assert anchor in slugs, alarm.page
        keys |= set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", " ".join(alarm.advice)))
    assert len(keys) > 10
    assert [key for key in keys if not exists(RunConfig, key)] == []


def test_the_documentation_has_the_thresholds() -> None:
    assert table() in (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
