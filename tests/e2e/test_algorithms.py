"""Each algorithm's recipe through a whole run of two steps: sampled, scored, corrected, trained,
sent to the engine."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.config.load import load_config
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from hybridflow.rewards.unit_tests import unit_test_of
from hybridflow.saving.reader import CheckpointFolder
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow

GROUP = 4
SMALL = [
    "data.train_batch_size=4",
    f"rollout.n={GROUP}",
    "model.hf_config.num_hidden_layers=2",
    "model.hf_config.hidden_size=64",
    "model.hf_config.intermediate_size=128",
    "sft=smoke",
    "trainer.total_steps=2",
    "trainer.test_every_steps=0",
    "trainer.save_every_steps=0",
    "trainer.export=false",
    "trainer.report=false",
    "trainer.loggers=[jsonl]",
    "actor.optim.lr=3e-3",
    "actor.optim.lr_warmup_steps=0",
]
CORRECTION = "actor.rollout_correction"
TWICE = "actor.ppo_epochs=2"  # the second update of a step differs from the policy that sampled
BONUS = "actor.entropy_coef=0.01"  # a gradient where all answers to a prompt have one score
CASES: dict[str, list[str]] = {
    "rloo": ["tiny-rloo", TWICE],
    "remax": ["tiny-remax", TWICE],
    "gspo": ["tiny-gspo", TWICE],
    "reinforce-plus-plus": ["tiny-reinforce-plus-plus", TWICE],
    "online-dpo": ["tiny-online-dpo"],
    "dapo": ["tiny-dapo", TWICE],
    "dapo-corrected": [
        "tiny-dapo",
        TWICE,
        "algorithm.dynamic_sampling=2",
        "algorithm.overlong_filter=true",
        "reward.overlong_tokens=2",
        "data.val_max_prompts=8",
        "trainer.test_every_steps=2",
        "rollout.val_samples=4",
        "rollout.val_sampling.temperature=1",
        f"{CORRECTION}.weight=token",
        f"{CORRECTION}.reject={{seq_mean_k1: [0.9, 1.1], token_k3: 0.5}}",
    ],
    "code": ["tiny-code-grpo", "sft.steps=60", "sft.batch_size=64", "sft.optim.lr=3e-3", BONUS],
    "cure": [
        *("tiny-cure", "roles.tester.model.path=null"),
        *("sft.steps=60", "sft.batch_size=64", "sft.optim.lr=3e-3", BONUS),
    ],
    "kto": ["tiny-online-dpo", "algorithm=kto"],
    "optimal-token-baseline": [
        "tiny-rloo",
        "algorithm.adv_estimator=optimal_token_baseline",
        TWICE,
    ],
}
# the flows of other cases with another estimator or loss, whose numbers tests/unit/algorithms has
IN_FULL = {"kto", "optimal-token-baseline"}
RUN_PROGRAMS = {"code", "cure"}  # they bring their own data and reward
NUMBERS = (
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "critic/advantages/mean",
    "critic/rewards/mean",
)


def rloo(rows: list[dict[str, Any]]) -> np.ndarray:
    scores = np.array([row["score"] for row in rows])
    return scores - (scores.sum() - scores) / (len(scores) - 1)


def grpo(rows: list[dict[str, Any]]) -> np.ndarray:
    scores = np.array([row["score"] for row in rows])
    return (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)


def dpo(rows: list[dict[str, Any]]) -> np.ndarray:
    """DPO's in the first step, in which policy and reference agree: half of beta, times the samples
    of the prompt."""
    scores = np.array([row["score"] for row in rows])
    found = np.zeros(len(rows))
    if scores.max() > scores.min():
        found[scores.argmax()], found[len(scores) - 1 - scores[::-1].argmin()] = (
            0.05 * len(rows),
            -0.05 * len(rows),
        )
    return found


ADVANTAGES: dict[str, Callable[[list[dict[str, Any]]], np.ndarray]] = {
    "rloo": rloo,
    "gspo": grpo,
    "dapo": grpo,
    "online-dpo": dpo,
}


Runs = Callable[[str], tuple[int, Path, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Runs:
    """Exit code, folder and output of a case, which runs when it is first asked for."""
    folder: Path = tmp_path_factory.mktemp("algorithms")
    given = [word for word in settings if word.startswith(("reward", "data.prepare.out="))]
    # with which the data was made
    options = json.dumps(load_config("e2e").data.prepare.options).replace('"', "")
    sums = [*given, f"data.prepare.options={options}"]

    @functools.cache
    def run_case(name: str) -> tuple[int, Path, str]:
        recipe, *own = CASES[name]
        data = [f"data.prepare.out={folder / 'data' / name}"] if name in RUN_PROGRAMS else sums
        words = ("--config-name", recipe, *SMALL, *data, *own)
        place = (f"name={name}", f"output_dir={folder}")
        with ForkedRun(folder / "output", "train", *words, *place) as run:
            return run.end(600), folder / name, run.out + run.err

    return run_case


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in IN_FULL else []) for name in CASES],
)
def test_two_steps(runs: Runs, name: str) -> None:
    """The policy moves, engine and trainer stay at one policy, and what the algorithm reports is
    reported."""
    folder = folder_of(runs, name)
    records: list[dict[str, Any]] = [
        r for r in read_jsonl(folder / "metrics.jsonl") if r["phase"] == "train"
    ]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert np.isfinite([record[number] for number in NUMBERS]).all()
        assert record["rollout/logprob_diff/max"] < 1e-4 and record["actor/grad_norm"] > 0
        assert abs(record["rollout/mismatch/kl"]) < 1e-4 and record[
            "rollout/mismatch/ess"
        ] == pytest.approx(1, abs=1e-3)
        if name == "remax":
            assert record["timing_s/gen_greedy"] > 0
        if name == "dapo-corrected":
            assert 1 <= record["sampling/batches"] <= 2 and 0 < record["sampling/tokens_used"] <= 1
            assert record["rollout_correction/weight"] == pytest.approx(1, abs=1e-3)
            assert record["rollout_correction/rejected"] == 0
    if name in RUN_PROGRAMS:
        return
    before, after = (
        weights(folder / "checkpoints" / f"global_step_{step}" / "policy") for step in (0, 2)
    )
    assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-4


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_advantages_of_a_run_follow_from_its_scores(runs: Runs, name: str) -> None:
    groups = first_step(folder_of(runs, name))
    assert len(groups) == 4 and any(
        row["score"] != rows[0]["score"] for rows in groups for row in rows
    )
    for rows in groups:
        assert [row["advantage"] for row in rows] == pytest.approx(
            ADVANTAGES[name](rows), abs=1e-4
        ), rows


def test_remax_compares_all_answers_to_a_prompt_with_one_score(
    runs: Runs,
) -> None:
    for rows in first_step(folder_of(runs, "remax")):
        baselines = np.array([row["score"] - row["advantage"] for row in rows])
        assert baselines == pytest.approx(baselines[0], abs=1e-5)
        # scores are sevenths
        assert baselines[0] * 7 == pytest.approx(round(baselines[0] * 7), abs=1e-4)


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_batch(
    runs: Runs,
) -> None:
    """In the first step, in which the penalty for leaving the reference is 0."""
    rows = [row for group in first_step(folder_of(runs, "reinforce-plus-plus")) for row in group]
    scores = np.array([row["score"] for row in rows])
    tokens = scores.repeat([row["response_length"] for row in rows])
    expected = (scores - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-4)


def test_programs_are_run_and_their_tests_counted(
    runs: Runs,
) -> None:
    rows = [row for group in first_step(folder_of(runs, "code")) for row in group]
    extras = [json.loads(row["reward_extra"]) for row in rows]
    assert any(extra["failed_with"] != "no program" for extra in extras)
    for row, extra in zip(rows, extras, strict=True):
        assert extra["tests"] == 2 and row["score"] == (extra["passed"] == 2)


def test_programs_and_unit_tests_are_rewarded_apart(
    runs: Runs,
) -> None:
    """What a tester with random weights writes is hardly ever a unit test."""
    folder = folder_of(runs, "cure")
    programs = first_step(folder)
    unit_tests = first_step(folder, "rollouts-tester")
    mixed = 0
    for codes, tests in zip(programs, unit_tests, strict=True):
        assert tests[0]["prompt_text"] == f"test {codes[0]['prompt_text']}"
        assert [row["advantage"] for row in codes] == pytest.approx(grpo(codes), abs=1e-4)
        wrong = sum(row["score"] == 0 for row in codes)
        is_mixed = 0 < wrong < GROUP
        mixed += is_mixed
        for row in tests:
            if not is_mixed:
                assert row["score"] == 0
            elif unit_test_of(row["response_text"]) is None:
                assert row["score"] == -wrong
            else:
                assert -wrong <= row["score"] <= wrong
    assert mixed


def folder_of(runs: Runs, name: str) -> Path:
    """The folder of a run that has ended well; skips where it needs the sandbox and this machine
    forbids that."""
    code, folder, said = runs(name)
    if code and name in RUN_PROGRAMS and "programs cannot be run safely on this machine" in said:
        pytest.skip("this machine forbids the sandbox")
    assert code == 0, said
    return folder


def first_step(folder: Path, dumps: str = "rollouts") -> list[list[dict[str, Any]]]:
    """The rows of the first step, prompt by prompt."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in read_rollouts(folder / dumps / "step_000001.parquet"):
        groups.setdefault(row["uid"], []).append(row)
    assert {len(rows) for rows in groups.values()} == {GROUP}
    return list(groups.values())


def weights(folder: Path) -> np.ndarray:
    """The output layer of a checkpoint."""
    source = CheckpointFolder(folder)
    found: np.ndarray = source.read("lm_head.weight", (0, 0), (17, 64)).numpy()
    return found


# the first sample that a step scores is never answered
HANGING = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["split"] == "train":
        try:
            os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            while True:
                time.sleep(3600)
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.mark.full
def test_a_reward_that_sleeps_for_ever_on_one_row_of_a_hundred_ends_with_its_deadline(
    tmp_path: Path, settings: list[str]
) -> None:
    (tmp_path / "hanging.py").write_text(HANGING.format(flag=str(tmp_path / "flag")))
    words = [
        *settings,
        "cluster=in-process",
        "data.train_batch_size=25",
        "rollout.n=4",
        "trainer.total_steps=1",
    ]
    words += [f"reward.path={tmp_path / 'hanging.py'}", "reward.timeout_s=20", "reward.processes=2"]
    words += [f"output_dir={tmp_path}", "name=hanging"]
    with Run(tmp_path / "output", "train", *words) as run:
        assert run.end(240) == 0, run.out + run.err
    said = "1 of 100 rows have no score"
    assert (
        said in run.out + run.err and "no score within 20 s (reward.timeout_s)" in run.out + run.err
    )
    [record] = [
        r for r in read_jsonl(tmp_path / "hanging" / "metrics.jsonl") if r["phase"] == "train"
    ]
    assert record["reward/failed"] == pytest.approx(0.01) and record["actor/grad_norm"] > 0
    rows = read_rollouts(tmp_path / "hanging" / "rollouts" / "step_000001.parquet")
    assert sum("no score within 20 s" in str(row["reward_extra"]) for row in rows) == 1
