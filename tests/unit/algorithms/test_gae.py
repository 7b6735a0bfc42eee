"""Advantages from values, the value loss and the KL coefficient: against verl's numbers, against a
loop, and by what must hold."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.estimators.base import token_rewards
from hybridflow.algorithms.kl_control import KlControl
from hybridflow.algorithms.losses import aggregate, kl_penalty
from hybridflow.algorithms.value_losses import preference_loss, value_token_loss
from hybridflow.algorithms.whitening import whiten
from hybridflow_kernels.scans import gae

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "verl_advantages.json").read_text())
UNIT = st.sampled_from([0.0, 0.5, 0.9, 0.97, 1.0])
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=9)


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(list(chain.from_iterable(rows)))


def random_rows(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards [T], values [T], lengths [S]; float32 as the batch holds them."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(sum(lengths), generator=generator) for _ in range(2))
    return rewards, values, torch.tensor(lengths)


# ---- verl's numbers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    GOLDEN["gae"],
    ids=lambda case: f"gamma{case['gamma']}-lam{case['lam']}-{len(case['lengths'])}rows",
)
def test_advantages_and_returns_equal_verl(case: dict[str, Any]) -> None:
    mask = flat(case["mask"]).bool()
    lengths = torch.tensor(case["lengths"])
    found = gae(
        flat(case["rewards"]),
        flat(case["values"]),
        lengths,
        gamma=case["gamma"],
        lam=case["lam"],
        mask_T=mask,
    )
    # verl fills tokens outside the mask with what it carried over them; nobody reads those
    torch.testing.assert_close(found[1][mask], flat(case["returns"])[mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        whiten(found[0], mask)[mask], flat(case["advantages"])[mask], rtol=1e-5, atol=1e-5
    )
    assert not found[0][~mask].any() and not found[1][~mask].any()


@pytest.mark.parametrize(
    "case", GOLDEN["value_loss"], ids=lambda case: f"clip{case['clip']}-{case['mode']}"
)
def test_the_value_loss_equals_verl(case: dict[str, Any]) -> None:
    new, old, returns = (flat(case[name]) for name in ("new", "old", "returns"))
    loss, metrics = value_token_loss(
        new, old, returns, clip=case["clip"] if case["clip"] < 1e6 else None
    )
    total, count = aggregate(loss, torch.tensor(case["lengths"]), case["mode"])
    assert float(total / count) == pytest.approx(case["loss"], rel=1e-5)
    held, tokens = metrics["critic/vf_clipfrac"]
    assert float(held / tokens) == pytest.approx(case["clipfrac"], abs=1e-6)


@pytest.mark.parametrize("case", GOLDEN["rewards"], ids=lambda case: case["kind"])
def test_rewards_with_an_adaptive_penalty_equal_verl(case: dict[str, Any]) -> None:
    control = KlControl(0.2, 0.1, 50)
    for step in case["steps"]:
        assert control.value == pytest.approx(step["coefficient"], rel=1e-6)
        lengths = torch.tensor(step["lengths"])
        divergence = kl_penalty(flat(step["old"]), flat(step["reference"]), case["kind"])
        rewards = token_rewards(torch.tensor(step["scores"]), control.value * divergence, lengths)
        torch.testing.assert_close(rewards, flat(step["rewards"]), rtol=1e-5, atol=1e-6)
        control.update(step["kl"], 4)
    assert control.value == pytest.approx(case["coefficient_after"], rel=1e-6)


def test_a_fixed_coefficient_stays() -> None:
    control = KlControl(0.3)
    control.update(100.0, 1000)
    assert control.value == 0.3


# ---- properties
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(lengths=LENGTHS, gamma=UNIT, lam=UNIT, seed=st.integers(0, 99))
def test_it_equals_a_loop_over_tokens(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rewards, values, sizes = random_rows(lengths, seed)
    advantages, returns = gae(rewards, values, sizes, gamma=gamma, lam=lam)
    for r, v, a, g in zip(
        *(column.split(lengths) for column in (rewards, values, advantages, returns)), strict=True
    ):
        running = 0.0
        following = 0.0
        for t in reversed(range(len(r))):
            running = float(r[t]) + gamma * following - float(v[t]) + gamma * lam * running
            following = float(v[t])
            assert float(a[t]) == pytest.approx(running, abs=2e-5)
            assert float(g[t]) == pytest.approx(running + float(v[t]), abs=2e-5)


@pytest.mark.slow
@given(lengths=LENGTHS, gamma=UNIT, seed=st.integers(0, 99))
def test_with_lambda_1_the_return_is_the_discounted_reward_to_go(
    lengths: list[int], gamma: float, seed: int
) -> None:
    rewards, values, sizes = random_rows(lengths, seed)
    advantages, returns = gae(rewards, values, sizes, gamma=gamma, lam=1.0)
    for r, v, a, g in zip(
        *(column.split(lengths) for column in (rewards, values, advantages, returns)), strict=True
    ):
        to_go = torch.tensor(
            [sum(gamma ** (j - i) * float(r[j]) for j in range(i, len(r))) for i in range(len(r))]
        )
        torch.testing.assert_close(g, to_go, rtol=1e-4, atol=1e-4)  # whatever the values are
        torch.testing.assert_close(a, to_go - v, rtol=1e-4, atol=1e-4)


@given(lengths=LENGTHS, gamma=UNIT, lam=UNIT, seed=st.integers(0, 99))
def test_true_values_leave_no_advantage(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rewards, _, sizes = random_rows(lengths, seed)
    exact, _ = gae(rewards, torch.zeros_like(rewards), sizes, gamma=gamma, lam=1.0)
    advantages, returns = gae(rewards, exact, sizes, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, torch.zeros_like(rewards), rtol=0, atol=1e-4)
    torch.testing.assert_close(returns, exact, rtol=0, atol=1e-4)


@given(lengths=LENGTHS, gamma=UNIT, lam=UNIT, seed=st.integers(0, 99))
def test_rows_do_not_see_each_other(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rewards, values, sizes = random_rows(lengths, seed)
    whole, _ = gae(rewards, values, sizes, gamma=gamma, lam=lam)
    alone = [
        gae(r, v, torch.tensor([len(r)]), gamma=gamma, lam=lam)[0]
        for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True)
    ]
    assert torch.equal(whole, torch.cat(alone))


@given(lengths=LENGTHS, gamma=UNIT, lam=UNIT, seed=st.integers(0, 99))
def test_observations_are_as_if_they_were_not_there(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rewards, values, sizes = random_rows(lengths, seed)
    mask = torch.rand(len(rewards), generator=torch.Generator().manual_seed(seed + 1)) < 0.6
    kept = torch.tensor([int(part.sum()) for part in mask.split(lengths)])
    found = gae(rewards, values, sizes, gamma=gamma, lam=lam, mask_T=mask)
    without = gae(rewards[mask], values[mask], kept, gamma=gamma, lam=lam)
    assert torch.equal(found[0][mask], without[0]) and torch.equal(found[1][mask], without[1])


@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_the_reward_of_a_row_is_its_score_less_its_penalties(lengths: list[int], seed: int) -> None:
    penalty, _, sizes = random_rows(lengths, seed)
    scores = torch.randn(len(lengths), generator=torch.Generator().manual_seed(seed + 1))
    rewards = token_rewards(scores, penalty, sizes)
    for row, cost, score in zip(
        rewards.split(lengths), penalty.split(lengths), scores, strict=True
    ):
        if len(row):
            torch.testing.assert_close(row[:-1], -cost[:-1])
            torch.testing.assert_close(row[-1], score - cost[-1])


@given(values=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40))
def test_whitening_gives_mean_0_and_variance_1(values: list[float]) -> None:
    whitened = whiten(torch.tensor(values))
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-3)
    if float(torch.tensor(values).std()) > 1e-2:
        assert float(whitened.std()) == pytest.approx(1.0, abs=1e-3)


def test_one_token_alone_is_whitened_to_0() -> None:
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
    assert whiten(torch.zeros(0)).tolist() == []


# ---- losses
# --------------------------------------------------------------------------------------------------


def test_a_value_beyond_the_clip_range_has_no_gradient_towards_the_return() -> None:
    new = torch.tensor([2.0, 0.3, -2.0]).requires_grad_()
    # the first and third have moved by more than 0.5 towards their return: held; the second may go
    # on
    loss, metrics = value_token_loss(new, torch.zeros(3), torch.tensor([3.0, 1.0, -3.0]), clip=0.5)
    loss.sum().backward()
    assert new.grad is not None and [bool(g) for g in new.grad] == [False, True, False]
    assert float(metrics["critic/vf_clipfrac"][0]) == 2.0


def test_pairs_are_compared_and_only_their_difference_counts() -> None:
    scores = torch.tensor([2.0, 1.0, -1.0, 3.0]).requires_grad_()
    loss, metrics = preference_loss(scores)
    expected = -torch.tensor([1.0, -4.0]).sigmoid().log()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(preference_loss(scores + 7.0)[0], loss)
    loss.sum().backward()
    assert scores.grad is not None and scores.grad[0] == -scores.grad[1] and scores.grad[0] < 0
    assert [float(metrics[f"reward/{name}"][0]) for name in ("accuracy", "margin")] == [1.0, -3.0]
