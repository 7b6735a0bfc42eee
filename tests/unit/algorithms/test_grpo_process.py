"""GRPO whose turns or tokens have rewards of their own, from the columns of a batch to the
advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import AlgorithmConfig, RewardConfig, RunConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.trainer.advantages import Advantages

# two answers to prompt 4, of two turns and of one; one answer of a turn to prompt 9 and another
# that is all masked
MASKS = ([1, 1, 0, 0, 1], [1, 1, 1], [0, 1], [0, 0])
UID = (4, 4, 9, 9)


def advantages_of(*extras: dict[str, Any], **algorithm: Any) -> list[list[float]]:
    def jagged(rows: list[Any], dtype: Any) -> Jagged:
        return Jagged.from_rows([np.array(row) for row in rows], dtype)

    extra = np.empty(len(extras), dtype=object)
    extra[:] = extras
    batch = DataProto.from_columns(
        {
            "uid": np.array(UID),
            "response_ids": jagged(list(MASKS), np.int64),
            "response_mask": jagged(list(MASKS), np.bool_),
            "old_log_probs": jagged([[-0.5] * len(row) for row in MASKS], np.float32),
            "ref_log_probs": jagged([[-1.0] * len(row) for row in MASKS], np.float32),
            "scores": np.array([100.0, 50.0, 0.0, 7.0], np.float32),  # do not count
            "reward_extra": extra,
        }
    )
    config = RunConfig(
        algorithm=AlgorithmConfig(adv_estimator="grpo_process", **algorithm),
        reward=RewardConfig(weight=2.0),
    )
    return [row.tolist() for row in Advantages(config).add(batch).jagged("advantages")]


def test_a_token_has_what_its_turn_and_the_following_ones_are_worth() -> None:
    """Prompt 4's turns have 2, 8 and 2: mean 4. The only turn left of prompt 9 is compared with
    nothing."""
    by_turn = ({"turn_rewards": [1.0, 4.0]}, {"turn_rewards": [1.0]}, {"turn_rewards": [1.0]}, {})
    first, second, third, masked = advantages_of(*by_turn, norm_adv_by_std=False)
    assert first == [2.0, 2.0, 0.0, 0.0, 4.0] and second == [-2.0] * 3
    assert third == [0.0, 0.0] and masked == [0.0, 0.0]
    spread = float(torch.tensor([2.0, 8.0, 2.0]).std())
    assert advantages_of(*by_turn)[0] == pytest.approx(
        [2 / spread, 2 / spread, 0, 0, 4 / spread], abs=1e-5
    )


def test_tokens_with_rewards_and_their_penalties() -> None:
    tokens = ({"token_rewards": [1.0, 0.0, 2.0]}, {"token_rewards": [0.0, 0.0, 1.5]}, {}, {})
    mean = 2 * 4.5 / 6
    wanted = [2 + 4 - 3 * mean, 0 + 4 - 2 * mean, 0.0, 0.0, 4 - mean]
    assert advantages_of(*tokens, norm_adv_by_std=False)[0] == pytest.approx(wanted, abs=1e-6)
    # the same penalty at every token moves the mean alone
    penalised = advantages_of(*tokens, norm_adv_by_std=False, kl_coef=0.3)
    assert penalised[0] == pytest.approx(wanted, abs=1e-5)
    # of turns it does not: they are of different lengths
    by_turn = ({"turn_rewards": [1.0, 1.0]}, {"turn_rewards": [1.0]}, {}, {})
    assert advantages_of(*by_turn)[1] == [0.0] * 3
    assert advantages_of(*by_turn, norm_adv_by_std=False, kl_coef=0.2)[1] == pytest.approx(
        [-0.1] * 3, abs=1e-6
    )


def test_turns_of_an_answer_that_was_ended_count_nothing_and_too_many_rewards_are_refused() -> None:
    ended = ({"turn_rewards": [3.0]}, {"turn_rewards": [0.0]}, {}, {})
    assert advantages_of(*ended, norm_adv_by_std=False)[0] == [2.0, 2.0, 0.0, 0.0, -2.0]
    with pytest.raises(
        DataError, match="row 1: the reward returned 2 turn_rewards, but the policy sampled 1 turns"
    ):
        advantages_of({"turn_rewards": [1.0]}, {"turn_rewards": [1.0, 1.0]}, {}, {})
    with pytest.raises(DataError, match=r"row 0: .*turn_rewards=0\.5, expected a list of numbers"):
        advantages_of({"turn_rewards": 0.5}, {}, {}, {})
    with pytest.raises(ConfigError, match="requires a reward for each turn or token"):
        advantages_of({}, {}, {}, {})
