"""Groups without a difference are replaced within a bound, and samples that are left out enter no
statistic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from hybridflow.algorithms.estimators.base import overlong_penalties
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.entries import ESTIMATORS
from hybridflow.config.schema import (
    AlgorithmConfig,
    DataConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from hybridflow.data.packing import without_rows
from hybridflow.single_controller import block_on
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.samples import (
    DynamicSampling,
    Sampled,
    groups_that_differ,
    without_overlong,
)
from tests.unit.trainer.worlds import PROMPTS, N, World, config_of, records, trainer_of


def batch_of(scores: list[float], uid: list[int], lengths: list[int] | None = None) -> DataProto:
    lengths = lengths or [2] * len(scores)
    tokens = Jagged.from_lengths(np.arange(sum(lengths)), np.array(lengths))
    ends = np.array(["length" if length == 4 else "stop" for length in lengths], dtype=object)
    return DataProto.from_columns(
        {
            "response_ids": tokens,
            "response_mask": Jagged(np.ones(sum(lengths), bool), tokens.offsets),
            "scores": np.array(scores, np.float32),
            "uid": np.array(uid),
            "finish_reason": ends,
        }
    )


def config(rounds: int, prompts: int = 2, **algorithm: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(train_batch_size=prompts),
        algorithm=AlgorithmConfig(dynamic_sampling=rounds, **algorithm),
    )


def test_groups_of_equal_scores_are_replaced_by_those_of_the_next_batch() -> None:
    sampling = DynamicSampling(config(rounds=5))
    assert sampling.add(batch_of([1, 1, 0, 1], [0, 0, 1, 1])) is None
    extra = np.array([{}, {}, {"x": 1}, {}], dtype=object)
    found = sampling.add(
        batch_of([1, 0, 0, 1], [0, 0, 1, 1], [3] * 4).with_columns(reward_extra=extra)
    )
    assert (
        found is not None
        and found["uid"].tolist() == [1, 1, 2, 2]
        and found["scores"].tolist() == [0, 1, 1, 0]
    )
    assert found["reward_extra"].tolist() == [{}] * 4
    assert sampling.metrics == {
        "sampling/batches": 2.0,
        "sampling/groups_differ": 0.75,
        "sampling/groups_thrown_away": 1.0,
        "sampling/groups_surplus": 1.0,
        "sampling/groups_filled": 0.0,
        "sampling/tokens_thrown_away": 10.0,
        "sampling/tokens_used": 0.5,
    }


def test_a_bound_ends_it_and_groups_without_a_difference_fill_the_step() -> None:
    sampling = DynamicSampling(config(rounds=2))
    assert sampling.add(batch_of([1, 1, 0, 0], [0, 0, 1, 1])) is None
    found = sampling.add(batch_of([1, 1, 0, 1], [0, 0, 1, 1]))
    assert found is not None and found["uid"].tolist() == [0, 0, 3, 3]
    assert (
        sampling.metrics["sampling/groups_filled"] == 1
        and sampling.metrics["sampling/groups_thrown_away"] == 2
    )


def test_without_it_a_batch_goes_through_untouched() -> None:
    sampling = DynamicSampling(config(rounds=0))
    batch = batch_of([1, 1], [0, 0])
    assert sampling.add(batch) is batch and sampling.metrics == {}


def test_a_sample_that_is_left_out_makes_no_difference() -> None:
    batch = batch_of([1, 1, 0, 0, 1, 1], [7, 7, 7, 3, 3, 3], [2, 2, 4, 2, 2, 2])
    assert groups_that_differ(batch).tolist() == [7, 3]
    assert groups_that_differ(without_overlong(batch)).tolist() == [3]


def test_the_loop_asks_further_prompts_and_says_so(tmp_path: Path) -> None:
    class Mostly(World):
        rounds = 0

        async def score(self, batch: DataProto) -> DataProto:
            """Nothing differs in the first batch of a step; then everything does."""
            self.rounds += 1
            right = np.arange(len(batch)) % N == 0 if self.rounds % 2 == 0 else np.zeros(len(batch))
            text = np.array(["x"] * len(batch), dtype=object)
            return DataProto.from_columns(
                {"response_text": text, "scores": right.astype(np.float32)}
            )

    world = Mostly()
    settings = config_of(tmp_path, total_steps=2, val_before_train=False)
    trainer = trainer_of(replace(settings, algorithm=AlgorithmConfig(dynamic_sampling=3)), world)
    cast(Sampled, trainer.samples).scorer.score = world.score  # type: ignore[method-assign]
    block_on(trainer.fit())
    assert world.calls.count("generate") == 4 and world.calls.count("update") == 2
    first, second = records(trainer, "train")
    assert first["sampling/batches"] == second["sampling/batches"] == 2
    assert first["sampling/groups_thrown_away"] == PROMPTS and first["sampling/tokens_used"] < 1


# ---- samples that are left out


NAMES = sorted(
    name for name in ESTIMATORS.names() if name != "gdpo" and not ESTIMATORS.get(name).reads
)  # those that need scores alone


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_those_of_the_batch_without_the_samples_that_are_left_out(name: str) -> None:
    scores = [1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 0.75]
    lengths = [3, 2, 1, 4, 2, 2, 3]
    batch = batch_of(scores, [0, 0, 0, 0, 1, 1, 1], lengths)
    if ESTIMATORS.get(name).takes_parts:
        extras = [{"turn_rewards": [score]} for score in scores]
        batch = batch.with_columns(reward_extra=np.array(extras, dtype=object))
    left_out = np.array([False, True, False, False, False, False, True])
    made = Advantages(RunConfig(algorithm=AlgorithmConfig(adv_estimator=name)))
    found = made.add(without_rows(batch, left_out))
    wanted = made.add(batch.rows(~left_out))
    rows = list(found.jagged("advantages"))
    kept = np.flatnonzero(~left_out)
    for row, other in zip(kept, wanted.jagged("advantages"), strict=True):
        np.testing.assert_array_equal(rows[row], other)
    assert not any(rows[row].any() for row in np.flatnonzero(left_out))
    np.testing.assert_array_equal(found["rewards"][kept], wanted["rewards"])


def test_the_last_sample_of_a_group_has_nothing_to_be_compared_with() -> None:
    made = Advantages(RunConfig(algorithm=AlgorithmConfig(adv_estimator="grpo")))
    batch = batch_of([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    found = made.add(without_rows(batch, np.array([False, True, False, False])))
    assert [row.any() for row in found.jagged("advantages")] == [False, False, True, True]
    none = made.add(without_rows(batch, np.ones(4, bool)))
    assert not none.jagged("advantages").values.any()


# ---- long answers


def test_the_soft_punishment_is_that_of_the_paper() -> None:
    found = overlong_penalties(torch.tensor([5, 6, 8, 10, 11]), limit=10, buffer=4, penalty=0.5)
    assert found.tolist() == [0.0, 0.0, 0.25, 0.5, 0.625]


def test_long_answers_lose_reward_and_keep_their_score() -> None:
    settings = RunConfig(
        data=DataConfig(max_response_length=4),
        rollout=RolloutConfig(n=2),
        reward=RewardConfig(overlong_tokens=2, overlong_penalty=1.0),
    )
    made = Advantages(settings)
    found = made.add(batch_of([1.0, 1.0, 1.0], [0, 0, 0], [2, 3, 4]))
    assert found["rewards"].tolist() == [1.0, 0.5, 0.0] and found["scores"].tolist() == [
        1.0,
        1.0,
        1.0,
    ]
    assert made.metrics["reward/overlong"] == pytest.approx(2 / 3)
    first, _, last = (float(row[0]) for row in found.jagged("advantages"))
    assert first > 0 > last
