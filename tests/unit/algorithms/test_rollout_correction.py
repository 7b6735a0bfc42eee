"""The correction within the policy loss: what is weighted, what is rejected, and what the
configuration refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridflow.algorithms.rollout_correction import kept_tokens
from hybridflow.config.check import problems
from hybridflow.config.load import load_config
from hybridflow.workers.losses import PolicyLoss


class Micro:
    """Five tokens of three sequences; the engine is far off at the second and in the last
    sequence."""

    lengths = torch.tensor([2, 1, 2])

    def __init__(self) -> None:
        old = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
        engine = torch.tensor([-1.0, -3.0, -1.0, -2.0, -2.0])
        self.columns = {
            "old_log_probs": old,
            "rollout_log_probs": engine,
            "advantages": torch.ones(5),
        }


def loss_of(
    *words: str, old: str | None = "old_log_probs"
) -> tuple[torch.Tensor, float, dict[str, Any]]:
    config = load_config("e2e", ["actor.kl_loss_coef=0", *words])
    assert problems(config) == []
    loss = PolicyLoss(config.actor, old)
    new = torch.full((5,), -1.0, requires_grad=True)
    total, count, metrics = loss(new, None, Micro())  # type: ignore[arg-type]
    total.backward()
    assert new.grad is not None and "rollout_log_probs" in loss.columns
    return new.grad, float(count), metrics


@pytest.mark.slow
@pytest.mark.parametrize("old", ["old_log_probs", None])
def test_weights_multiply_the_loss_of_each_token(old: str | None) -> None:
    """At ratio 1 the gradient of a token is minus its weight; e is above the bound."""
    gradient, count, metrics = loss_of("actor.rollout_correction.weight=token", old=old)
    torch.testing.assert_close(-gradient, torch.tensor([1.0, 2.0, 1.0, 2.0, 2.0]))
    assert count == 5 and [float(part) for part in metrics["rollout_correction/bounded"]] == [
        3.0,
        5.0,
    ]
    gradient, _, _ = loss_of(
        "actor.rollout_correction.weight=token", "actor.rollout_correction.lower=0.5", old=old
    )
    torch.testing.assert_close(-gradient, torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]))


def test_what_is_rejected_enters_neither_loss_nor_count() -> None:
    gradient, count, metrics = loss_of("actor.rollout_correction.reject={seq_mean_k1: [0.4, 2.5]}")
    torch.testing.assert_close(-gradient, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]))
    assert count == 1 and [float(part) for part in metrics["rollout_correction/rejected"]] == [
        4.0,
        5.0,
    ]
    gradient, count, _ = loss_of("actor.rollout_correction.reject={token_k2: 0.6}")
    torch.testing.assert_close(-gradient, torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]))
    assert count == 4


def test_the_worst_ratios_of_a_sequence() -> None:
    log_ratio = torch.tensor([0.0, 1.0, -1.0, 0.0])
    lengths = torch.tensor([2, 0, 2])
    assert kept_tokens(log_ratio, lengths, {"seq_min_k1": [0.5, 9.0]}).tolist() == [
        False,
        False,
        True,
        True,
    ]
    assert kept_tokens(log_ratio, lengths, {"seq_max_k1": [0.1, 2.0]}).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert kept_tokens(
        torch.zeros(0), torch.zeros(2, dtype=torch.int64), {"seq_max_k3": 1.0}
    ).shape == (0,)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["actor.rollout_correction.weight=token", "actor.old_log_probs=engine"],
            "would be applied twice",
        ),
        (["actor.rollout_correction.lower=0.5"], "has no effect with weight=none"),
        (
            ["actor.rollout_correction.weight=token", "actor.rollout_correction.lower=3"],
            "every weight would be 0",
        ),
        (["actor.rollout_correction.reject={seq_men_k1: [0.9, 1.1]}"], "did you mean seq_mean_k1"),
        (["actor.rollout_correction.reject={token_k1: 0.9}"], "two numbers"),
        (["actor.rollout_correction.reject={token_k3: [0.1, 0.9]}"], "one number"),
        (["actor.policy_loss=sapo"], "set actor.loss_agg_mode=seq-mean-token-mean"),
    ],
)
def test_combinations_without_sense_are_refused(words: list[str], said: str) -> None:
    [line] = problems(load_config("e2e", words))
    assert said in line
