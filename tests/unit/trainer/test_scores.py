"""Whatever a reward returns, a step's advantages are finite, and what one row returns does not move
other prompts."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms.estimators.base import Samples
from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.config.entries import ESTIMATORS
from hybridflow.config.schema import AlgorithmConfig, RewardConfig, RunConfig
from hybridflow.rewards.functions import checked
from hybridflow.rollout.evaluation import with_failures, without_failed
from hybridflow.trainer.advantages import Advantages, RequiredParts


class Lies:
    """Its methods are of no use."""

    def __float__(self) -> float:
        raise RuntimeError("no")

    __str__ = __repr__ = __float__  # type: ignore[assignment]


NAN = math.nan
INF = math.inf
# what a reward may return -> the score that counts; None: the row failed
RETURNED: list[tuple[Any, float | None]] = [
    *((0, 0.0), (1, 1.0), (-1, -1.0), (True, 1.0), (False, 0.0), (0.25, 0.25), (-0.0, 0.0)),
    *((5e-324, 5e-324), (1e-40, 1e-40)),
    *(
        (1e30, 1e30),
        (-1e30, -1e30),
        (3.4e38, None),
        (-3.4e38, None),
        (1e39, None),
        (-((1e30 - 5) ** 2), None),
    ),
    *((NAN, None), (INF, None), (-INF, None), (10**400, None), (-(10**400), None), (10**20, 1e20)),
    *(
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.uint8(3), 3.0),
    ),
    *(
        (np.bool_(True), 1.0),
        (np.bool_(False), 0.0),
        (np.isclose(1.0, 1.0), 1.0),
        (np.array(0.5), 0.5),
    ),
    *(
        (np.array(True), 1.0),
        (np.array([0.5]), None),
        (np.array([]), None),
        (np.float32(NAN), None),
    ),
    *(
        (np.float64(1e300), None),
        (np.longdouble(0.5), 0.5),
        (np.complex64(1), None),
        (np.datetime64("2026"), None),
    ),
    *(
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
        (torch.tensor(2), 2.0),
        (torch.tensor([0.5]), None),
    ),
    *((torch.tensor(0.5, requires_grad=True), 0.5), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5)),
    *(
        (torch.tensor(NAN), None),
        (torch.tensor(1 + 0j), None),
        (Fraction(1, 2), 0.5),
        (Fraction(10**400), None),
    ),
    *(
        (Decimal("0.5"), 0.5),
        (Decimal("NaN"), None),
        (Decimal("sNaN"), None),
        (Decimal("1e999999"), None),
    ),
    *(
        (None, None),
        ("1", None),
        ("", None),
        (b"1", None),
        ([], None),
        ([1.0], None),
        ((1.0,), None),
        (1j, None),
    ),
    *(
        ({}, None),
        ({"score": None}, None),
        ({"score": NAN}, None),
        ({"score": "1"}, None),
        ({"reward": 1.0}, None),
    ),
    *(
        ({"score": 1}, 1.0),
        ({"score": np.bool_(True), "a": 1}, 1.0),
        ({"score": 1, "failure": "wrong digits"}, 1.0),
    ),
    *(
        ({"score": 1, 7: object()}, 1.0),
        ({"score": 1, "token_rewards": [1, NAN]}, None),
        (Lies(), None),
    ),
    *(
        ({"score": 1, "turn_rewards": 3}, None),
        ({"score": 1, "turn_rewards": [0.5]}, 1.0),
        (object(), None),
    ),
    *((type, None), (lambda: 1, None), (Exception("no"), None), ({"score": Lies()}, None)),
]
COMPARING = ("grpo", "rloo", "opo", "grpo_passk")
WHITENING = ("reinforce_plus_plus_baseline", "reinforce_plus_plus")


def score_of(value: Any) -> float | None:
    outcome = checked("the reward", value)
    assert ("failure" in outcome) != ("score" in outcome)
    return outcome.get("score")


@pytest.mark.parametrize(("value", "score"), RETURNED, ids=lambda value: type(value).__name__)
def test_a_returned_value_is_a_finite_score_or_a_failure(value: Any, score: float | None) -> None:
    found = score_of(value)
    assert found == score and (
        found is None or (type(found) is float and np.isfinite(np.float32(found)))
    )


def advantages(name: str, scores: list[float]) -> torch.Tensor:
    """[T] of four prompts with four samples of three tokens each."""
    count = len(scores)
    scores_B = torch.tensor(scores, dtype=torch.float32)
    lengths = torch.full((count,), 3)
    rewards = torch.zeros(3 * count)
    rewards[2::3] = scores_B
    entry = ESTIMATORS.get(name)
    samples = Samples(
        scores_B,
        rewards,
        torch.arange(4).repeat_interleave(4),
        lengths,
        torch.ones(3 * count, dtype=torch.bool),
        {},
    )
    return entry.function(samples, entry.options())[0]


@pytest.mark.parametrize("name", [*COMPARING, *WHITENING])
def test_no_returned_value_makes_advantages_that_are_not_finite(name: str) -> None:
    assert len(RETURNED) >= 60
    others = [0.0, 1.0, 1.0, 0.0, 0.5, 0.25, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 3.0, -1.0]
    alone = advantages(name, others)
    for value, _ in RETURNED:
        found = advantages(name, [score_of(value) or 0.0, *others[1:]])
        assert torch.isfinite(found).all(), value
        assert name in WHITENING or torch.equal(found[12:], alone[12:]), value


def batch_of(extras: list[dict[str, Any]], failures: list[str | None] | None = None) -> DataProto:
    rows = len(extras)
    columns: dict[str, Any] = {
        "uid": np.arange(rows) // 2,
        "scores": np.ones(rows, np.float32),
        "response_ids": Jagged.from_lengths(np.arange(3 * rows), np.full(rows, 3)),
        "response_mask": Jagged.from_lengths(
            np.array([True, False, True] * rows), np.full(rows, 3)
        ),
        "reward_extra": objects(extras),
    }
    if failures:
        columns["reward_failure"] = objects(failures)
    return DataProto.from_columns(columns)


def gdpo(batch: DataProto, on_failure: str = "zero") -> tuple[DataProto, list[float]]:
    algorithm = AlgorithmConfig(adv_estimator="gdpo", adv_estimator_options={"rewards": ["a"]})
    config = RunConfig(algorithm=algorithm, reward=RewardConfig(on_failure=on_failure))  # type: ignore[arg-type]
    batch = without_failed(with_failures(batch, RequiredParts(config).lost(batch)), on_failure)
    return batch, Advantages(config).add(batch).jagged("advantages").values.tolist()


@pytest.mark.parametrize("part", [NAN, INF, 10**400, "x", None, -(1e30**2), [1.0]])
@pytest.mark.parametrize("on_failure", ["zero", "drop"])
def test_a_part_that_is_no_finite_number_costs_its_row_alone(part: Any, on_failure: str) -> None:
    batch, found = gdpo(batch_of([{"a": part}, {"a": 1.0}, {"a": 1.0}, {"a": 0}]), on_failure)
    assert np.isfinite(found).all() and found[6] > 0 > found[9]
    texts = batch["reward_failure"].tolist()
    assert (
        "adv_estimator_options.rewards" in texts[0]
        and texts[1:] == [None] * 3
        and batch["scores"][1] == 1
    )


def test_a_row_whose_scoring_failed_has_no_parts_and_stops_nothing() -> None:
    _, found = gdpo(
        batch_of([{}, {"a": 1.0}, {"a": 1.0}, {"a": 0}], ["no score within 60 s", None, None, None])
    )
    assert np.isfinite(found).all() and found[0] < 0 < found[3]


def test_more_rewards_of_turns_than_turns_cost_their_row_alone() -> None:
    config = RunConfig(algorithm=AlgorithmConfig(adv_estimator="grpo_process"))
    batch = batch_of(
        [{"turn_rewards": [1.0, 0.0]}, {"turn_rewards": [1.0, 0.0, 1.0]}, {"turn_rewards": []}, {}]
    )
    texts = RequiredParts(config).lost(batch)
    assert [text is None for text in texts] == [
        True,
        False,
        True,
        True,
    ] and "3 turn_rewards" in str(texts[1])
    found = Advantages(config).add(with_failures(batch, texts)).jagged("advantages").values
    assert np.isfinite(found).all()


def test_the_weight_of_the_score_is_within_the_boundary() -> None:
    assert "failure" in checked("r", 1e20, 1e20) and "score" in checked("r", 1e20, 1e10)
