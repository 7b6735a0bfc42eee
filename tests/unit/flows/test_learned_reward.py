"""A reward model that learns beside the policy: its pairs, and what the check says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.check_entries import flow_problems
from hybridflow.config.schema import AlgorithmConfig, RewardModelConfig, RunConfig
from hybridflow.errors import ConfigError
from hybridflow.flows.learned_reward import pairs_of, preferred
from hybridflow.trainer.flow_check import check_flow
from tests.unit.flows.bodies import own
from tests.unit.trainer.worlds import config_of


def batch_of(rows: list[tuple[int, int]]) -> DataProto:
    """Rows of these (uid, score); answer k is k + 1 tokens of id k."""
    count = len(rows)
    answers = [np.full(row + 1, row) for row in range(count)]
    return DataProto.from_columns(
        {
            "uid": np.array([uid for uid, _ in rows], np.int64),
            "scores": np.array([score for _, score in rows], np.float32),
            "prompt_ids": Jagged.from_rows([[uid] for uid, _ in rows], np.int64),
            "response_ids": Jagged.from_rows(answers, np.int64),
        }
    )


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=20))
def test_a_pair_is_the_best_and_the_worst_answer_to_a_prompt(rows: list[tuple[int, int]]) -> None:
    best, worst = preferred(batch_of(rows))
    expected = []
    for uid in sorted({uid for uid, _ in rows}):
        scores = {row: score for row, (of, score) in enumerate(rows) if of == uid}
        high = min(scores, key=lambda row: (-scores[row], row))
        low = min(scores, key=lambda row: (scores[row], row))
        if scores[high] > scores[low]:
            expected.append((high, low))
    assert list(zip(best.tolist(), worst.tolist(), strict=True)) == expected


def test_a_row_of_pairs_has_its_prompt_and_both_answers() -> None:
    batch = batch_of([(0, 0), (0, 1), (1, 2), (1, 0)])
    pairs = pairs_of(batch, *preferred(batch))
    assert [row.tolist() for row in pairs["prompt_ids"]] == [[0], [1]]
    assert [row.tolist() for row in pairs["chosen_ids"]] == [[1, 1], [2, 2, 2]]
    assert [row.tolist() for row in pairs["rejected_ids"]] == [[0], [3, 3, 3, 3]]


def learning(folder: Path, flow: str | None, **given: Any) -> RunConfig:
    reward_model = RewardModelConfig(path="somewhere", **given)
    return replace(
        config_of(folder), algorithm=AlgorithmConfig(flow=flow), reward_model=reward_model
    )


def test_the_flow_passes_the_check_and_needs_the_key(tmp_path: Path) -> None:
    said = list[str]()
    check_flow(learning(tmp_path / "run", "learned_reward", trains=True), said.append)
    assert said == []
    with pytest.raises(ConfigError, match=r"reward_model.trains=true"):
        check_flow(learning(tmp_path / "run", "learned_reward"), print)


def test_a_reward_model_that_trains_and_is_not_updated_is_refused(tmp_path: Path) -> None:
    (problem,) = flow_problems(learning(tmp_path / "run", None, trains=True))
    assert "set algorithm.flow=learned_reward" in problem
    body = """
async for step in run.steps():
    batch = await run.samples()
    batch = await run.all(run.policy.log_probs(batch), run.reward_model.scores(batch))
    batch = run.advantages(batch)
    await run.policy.update(batch)
    await run.sync()
"""
    flow = own(tmp_path, body, ("policy", "reward_model"))
    with pytest.raises(ConfigError, match=r"never calls run.reward_model.update"):
        check_flow(learning(tmp_path / "run", flow, trains=True), print)


def test_pairs_without_a_column_are_refused(tmp_path: Path) -> None:
    body = """
async for step in run.steps():
    batch = await run.samples()
    batch = await run.all(run.policy.log_probs(batch), run.reward_model.scores(batch))
    batch = run.advantages(batch)
    await run.reward_model.update(batch)
    await run.policy.update(batch)
    await run.sync()
"""
    flow = own(tmp_path, body, ("policy", "reward_model"))
    with pytest.raises(ConfigError, match=r"no column 'chosen_ids'"):
        check_flow(learning(tmp_path / "run", flow, trains=True), print)
