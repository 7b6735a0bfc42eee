"""Advantages, losses and aggregation against the plainest way to write them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.estimators.base import Samples
from hybridflow.algorithms.estimators.grpo import grpo_advantages
from hybridflow.algorithms.estimators.optimal_token_baseline import optimal_token_baseline
from hybridflow.algorithms.losses import aggregate, kl_penalty
from hybridflow.algorithms.policy_losses.base import Tokens
from hybridflow.algorithms.policy_losses.ppo import PpoOptions, ppo

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]
scores_and_groups = st.lists(
    st.tuples(st.integers(-16, 16).map(lambda n: n / 8), st.integers(0, 5)), min_size=1, max_size=40
)


# ---- advantages
# --------------------------------------------------------------------------------------------------


def advantages_one_by_one(scores: list[float], groups: list[int], norm_by_std: bool) -> list[float]:
    """A loop over samples: what the paper says, with the convention for a group of one."""
    out = []
    for score, group in zip(scores, groups, strict=True):
        members = [s for s, g in zip(scores, groups, strict=True) if g == group]
        if len(members) == 1:
            out.append(score / (1 + 1e-6) if norm_by_std else score)
            continue
        mean = sum(members) / len(members)
        std = math.sqrt(sum((s - mean) ** 2 for s in members) / (len(members) - 1))
        out.append((score - mean) / (std + 1e-6) if norm_by_std else score - mean)
    return out


@pytest.mark.parametrize("norm_by_std", [True, False])
@given(rows=scores_and_groups)
def test_grpo_equals_a_loop_over_groups(norm_by_std: bool, rows: list[tuple[float, int]]) -> None:
    # ids are names, not positions
    scores = [score for score, _ in rows]
    groups = [group * 1000 - 7 for _, group in rows]
    found = grpo_advantages(torch.tensor(scores), torch.tensor(groups), norm_by_std=norm_by_std)
    expected = torch.tensor(advantages_one_by_one(scores, groups, norm_by_std))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_grpo_by_hand() -> None:
    scores = torch.tensor([1.0, 0.0, 5.0, 0.0, 0.0, 1.0, 2.0, 2.0])
    groups = torch.tensor([3, 3, 9, 3, 3, 1, 0, 0])
    std = math.sqrt(3 / 4 * 3 / 4 / 3 + 3 * (1 / 4) ** 2 / 3)
    expected = [0.75 / std, -0.25 / std, 5.0, -0.25 / std, -0.25 / std, 1.0, 0.0, 0.0]
    torch.testing.assert_close(
        grpo_advantages(scores, groups), torch.tensor(expected), rtol=1e-5, atol=1e-5
    )
    dr = grpo_advantages(scores, groups, norm_by_std=False)
    assert dr.tolist() == [0.75, -0.25, 5.0, -0.25, -0.25, 1.0, 0.0, 0.0]
    assert grpo_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.slow
@given(
    score=st.floats(-100, 100, width=32),
    size=st.integers(2, 64),
    others=st.lists(st.floats(-2, 2, width=32), max_size=5),
)
def test_equal_scores_have_exactly_no_advantage(
    score: float, size: int, others: list[float]
) -> None:
    """In float32 their mean is off by a rounding error, which the small eps turns into an advantage
    of 0.4."""
    scores = torch.tensor([score] * size + others)
    groups = torch.tensor([1] * size + [0] * len(others))
    for norm_by_std in (True, False):
        assert not grpo_advantages(scores, groups, norm_by_std=norm_by_std)[:size].any()
    weighted = torch.ones(8) * torch.tensor(0.1)
    assert not grpo_advantages(weighted, torch.zeros(8, dtype=torch.int64)).any()


# ---- the clipped surrogate
# --------------------------------------------------------------------------------------------------


def ppo_of_one_token(
    new: float, old: float, advantage: float, low: float, high: float, clip_c: float | None
) -> float:
    ratio = math.exp(min(max(new - old, -20), 20))
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if clip_c is not None and advantage < 0:
        objective = max(objective, clip_c * advantage)
    return -objective


def ppo_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    high: float = 0.2,
    clip_c: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = Tokens(new, torch.tensor([len(new)]), {"old_log_probs": old, "advantages": advantages})
    return ppo(tokens, PpoOptions(clip_ratio_high=high, clip_ratio_c=clip_c))


@pytest.mark.slow
@pytest.mark.parametrize("clip_c", [None, 3.0])
@given(
    tokens=st.lists(
        st.tuples(*[st.floats(-4, 0, width=32)] * 2, st.floats(-2, 2, width=32)),
        min_size=1,
        max_size=30,
    )
)
def test_ppo_loss_equals_the_formula_of_one_token(
    clip_c: float | None, tokens: list[tuple[float, float, float]]
) -> None:
    new, old, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    loss, metrics = ppo_loss(new, old, advantages, high=0.28, clip_c=clip_c)
    expected = [ppo_of_one_token(*token, 0.2, 0.28, clip_c) for token in tokens]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(metrics["actor/ppo_kl"], old - new)


def test_what_is_clipped_has_no_gradient_and_is_counted() -> None:
    new = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5, 4.0, 1.0])).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    loss, metrics = ppo_loss(new, torch.zeros(6), advantages, clip_c=3.0)
    loss.sum().backward()
    # better than the old policy by more than the bound: no further push; beyond dual clip: none
    # either
    assert [bool(value) for value in new.grad] == [False, True, True, False, False, True]
    assert [
        float(metrics[f"actor/{name}"].sum()) for name in ("pg_clipfrac", "pg_clipfrac_lower")
    ] == [2.0, 1.0]


def test_the_first_update_has_the_policy_gradient() -> None:
    """At ratio 1 the gradient of a token is minus its advantage, whatever the clipping."""
    new = torch.randn(50).requires_grad_()
    advantages = torch.randn(50)
    loss, metrics = ppo_loss(new, new.detach().clone(), advantages, clip_c=3.0)
    loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantages)
    assert not metrics["actor/ppo_kl"].any()


def test_ratios_out_of_range_stay_finite() -> None:
    new, old, advantages = torch.tensor([[0.0, -500.0], [-500.0, 0.0], [-1.0, 1.0]])
    loss, metrics = ppo_loss(new, old, advantages)
    assert torch.isfinite(loss).all()
    # as verl: the clamped log-ratio is averaged
    assert metrics["actor/ppo_kl"].tolist() == [-20.0, 20.0]


# ---- KL
# --------------------------------------------------------------------------------------------------


@given(d=st.floats(-3, 3))
def test_kl_kinds_equal_their_formulas(d: float) -> None:
    new = torch.tensor([d - 1.5], dtype=torch.float64)
    reference = torch.tensor([-1.5], dtype=torch.float64)
    for kind, value in {
        "k1": d,
        "abs": abs(d),
        "k2": d * d / 2,
        "k3": min(10.0, math.exp(-d) + d - 1),
    }.items():
        assert kl_penalty(new, reference, kind).item() == pytest.approx(value, abs=1e-9), kind
    assert kl_penalty(new, reference, "k3").item() >= -1e-12


def test_kl_estimates_the_divergence_and_is_bounded() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = ((torch.randn(12, generator=generator) / 2).log_softmax(0) for _ in range(2))
    truth = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):  # unbiased: their mean under p is the divergence
        torch.testing.assert_close((p.exp() * kl_penalty(p, q, kind)).sum(), truth)
    far = kl_penalty(torch.tensor([-100.0, 0.0]), torch.tensor([0.0, -100.0]), "k3")
    assert far.tolist() == [10.0, 10.0]
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(p, q, "k4")


@pytest.mark.parametrize(
    ("kind", "value", "slope"), [("k1", 100.0, 1.0), ("abs", 100.0, 1.0), ("k2", 5000.0, 100.0)]
)
def test_a_policy_far_from_the_reference_is_still_pulled_back(
    kind: str, value: float, slope: float
) -> None:
    """Only k3 grows exponentially and is clamped, as in verl; a clamp of the others would end their
    gradient."""
    new = torch.tensor([0.0]).requires_grad_()
    penalty = kl_penalty(new, torch.tensor([-100.0]), kind)
    penalty.sum().backward()
    assert penalty.item() == value and new.grad is not None and new.grad.item() == slope


# ---- aggregation
# --------------------------------------------------------------------------------------------------


def mean_by_hand(rows: list[torch.Tensor], mode: str) -> torch.Tensor:
    rows = [row for row in rows if len(row)]
    if mode.startswith("token"):
        return torch.cat(rows).mean() if mode == "token-mean" else torch.cat(rows).sum()
    return torch.stack(
        [row.sum() if mode == "seq-mean-token-sum" else row.mean() for row in rows]
    ).mean()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(any),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    seed=st.integers(0, 99),
)
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(
    mode: str, lengths: list[int], cuts: list[int], seed: int
) -> None:
    """Sums over micro-batches divided by the sum of counts, unless it is 0: value and gradient of
    the whole batch, however it is cut."""
    values = torch.randn(
        sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()
    rows = list(values.split(lengths))
    expected = mean_by_hand(rows, mode)
    (wanted,) = torch.autograd.grad(expected, values)

    bounds = sorted({0, len(lengths), *(cut for cut in cuts if cut < len(lengths))})
    totals = []
    counts = []
    for start, end in pairwise(bounds):
        total, count = aggregate(
            torch.cat(list(values.split(lengths))[start:end]),
            torch.tensor(lengths[start:end]),
            mode,
        )
        totals.append(total)
        counts.append(int(count))
    found = torch.stack(totals).sum() / max(sum(counts), 1)
    (gradient,) = torch.autograd.grad(found, values)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="batch-mean"):
        aggregate(torch.ones(2), torch.tensor([2]), "batch-mean")


# ---- the optimal token baseline
# --------------------------------------------------------------------------------------------------


def baseline_of(
    rewards: list[list[float]], p: list[list[float]], groups: list[int]
) -> list[list[float]]:
    """The estimator's answer for samples without observations, whose other tokens share what is
    left of p evenly."""
    flat = torch.tensor([value for row in p for value in row], dtype=torch.float64)
    lengths = torch.tensor([len(row) for row in rewards])
    columns = {"old_log_probs": flat.log(), "sum_pi_squared": flat**2 + (1 - flat) ** 2}
    tokens = torch.tensor([value for row in rewards for value in row], dtype=torch.float64)
    scores = torch.zeros(len(rewards))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    samples = Samples(scores, tokens, torch.tensor(groups), lengths, mask, columns)
    found, _ = optimal_token_baseline(samples, None)
    return [row.tolist() for row in found.split(lengths.tolist())]


def test_answers_count_by_the_gradient_that_they_have_gathered() -> None:
    """A token has 2 (1 - p)^2: 0.5 at p = 0.5, 0.02 at p = 0.9. The third answer is alone at its
    third token, the last one in its group."""
    rewards = [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0, 3.0], [2.0]]
    p = [[0.5, 0.5], [0.9, 0.5], [0.5, 0.9, 0.9], [0.5]]
    first = (0.5 * 1 + 0.02 * 0 + 0.5 * 3) / 1.02
    second = (1.0 * 1 + 0.52 * 0 + 0.52 * 3) / 2.04
    wanted = [[1 - first, 1 - second], [-first, -second], [3 - first, 3 - second, 3.0], [2.0]]
    for row, expected in zip(baseline_of(rewards, p, [5, 5, 5, 2]), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-7)


def test_equal_returns_leave_exactly_nothing_over_any_baseline() -> None:
    rewards = [[0.0, 0.1], [0.0, 0.1], [0.0, 0.1]]
    p = [[0.3, 0.7], [0.6, 0.2], [0.1, 0.9]]
    assert baseline_of(rewards, p, [1, 1, 1]) == [[0.0, 0.0]] * 3


@given(logits=st.lists(st.floats(-4, 4), min_size=2, max_size=12), temperature=st.floats(0.3, 2.0))
def test_half_the_temperature_gives_the_sum_of_squared_probabilities(
    logits: list[float], temperature: float
) -> None:
    """What `PolicyWorker.compute_sum_pi_squared` computes it by."""
    x = torch.tensor(logits, dtype=torch.float64) / temperature
    log_p = x.log_softmax(0)
    halved = (2 * x).log_softmax(0)
    torch.testing.assert_close(
        (2 * log_p - halved).exp(), log_p.exp().square().sum().expand(len(x))
    )
