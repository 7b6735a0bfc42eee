"""The newest losses and estimators against their formulas over padded rows, in float64, 200 random
cases each."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms.entropy_control import most_uncertain
from hybridflow.algorithms.estimators.base import Samples
from hybridflow.algorithms.estimators.gae import GaeOptions, gae_estimator
from hybridflow.algorithms.estimators.gigpo import GigpoOptions, gigpo
from hybridflow.algorithms.estimators.grpo import ScaledOptions, grpo
from hybridflow.algorithms.losses import kl_penalty, unbiased_kl
from hybridflow.algorithms.policy_losses.base import Tokens
from hybridflow.algorithms.policy_losses.vespo import VespoOptions, vespo
from hybridflow.algorithms.rollout_correction import on_policy_tokens
from hybridflow.algorithms.whitening import whiten
from hybridflow.config.schema import ActorConfig
from hybridflow.config.schema_rewards import RolloutCorrectionConfig
from hybridflow.errors import ConfigError
from hybridflow.workers.losses import PolicyLoss

CASES = range(210)  # a few have no token
NEAR: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


class Case:
    """Rows of tokens, one after another, with a random advantage each; some rows have no token."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.lengths = random.integers(0, 7, random.integers(1, 6))
        tokens = int(self.lengths.sum())
        spread = random.choice([0.01, 0.3, 3.0])

        def column(scale: float = spread, mean: float = -1.0) -> torch.Tensor:
            return torch.from_numpy(mean + scale * random.standard_normal(tokens))

        self.log_probs = column().requires_grad_()
        self.old = column()
        self.engine = column()
        self.reference = column()
        self.by_row = torch.from_numpy(
            random.choice([-1.5, -0.2, 0.0, 0.4, 2.0], len(self.lengths))
        )
        self.advantages = self.by_row.repeat_interleave(torch.from_numpy(self.lengths))
        names = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
        values = self.old, self.engine, self.reference, self.advantages
        self.columns = dict(zip(names, values, strict=True))

    def each(self, one_row: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The losses of `one_row`(log-probs, old, engine, reference, advantage) of each row."""
        columns = self.log_probs, self.old, self.engine, self.reference
        rows = zip(
            *(torch.split(column, self.lengths.tolist()) for column in columns),
            self.by_row,
            strict=True,
        )
        return torch.cat([one_row(*row) for row in rows])

    def same(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Values and gradients of every token agree."""
        torch.testing.assert_close(ours.detach(), theirs.detach(), **NEAR)
        upstream = torch.linspace(0.5, 1.5, len(ours), dtype=torch.float64)
        pair = (
            torch.autograd.grad(one, self.log_probs, upstream, retain_graph=True)[0]
            for one in (ours, theirs)
        )
        found, wanted = pair
        torch.testing.assert_close(found, wanted, **NEAR)


@pytest.mark.parametrize("k_neg", [3.0, 1.0])
def test_vespo_equals_its_formula(k_neg: float) -> None:
    options = VespoOptions(k_neg=k_neg)

    def one(log_probs: Any, old: Any, engine: Any, reference: Any, advantage: Any) -> torch.Tensor:
        log_w = sum(
            max(-20.0, min(20.0, float(a - b)))
            for a, b in zip(log_probs.detach(), old, strict=True)
        )
        w = math.exp(max(math.log(1e-8), min(20.0, log_w)))
        k, decay = (2.0, 3.0) if advantage >= 0 else (k_neg, 2.0)
        return (
            -(w**k)
            * math.exp(decay * (1 - w) if decay * (1 - w) > -700 else -700)
            * advantage
            * log_probs
        )

    for seed in CASES:
        case = Case(seed)
        found, _ = vespo(
            Tokens(case.log_probs, torch.from_numpy(case.lengths), case.columns), options
        )
        if len(found):
            case.same(found, case.each(one))


def test_sequences_off_the_policy_with_negative_advantage_are_masked() -> None:
    masked = 0
    for seed in CASES:
        case = Case(seed)
        kept = on_policy_tokens(
            case.log_probs, case.engine, case.advantages, torch.from_numpy(case.lengths), 0.2
        )

        def one(
            log_probs: Any, old: Any, engine: Any, reference: Any, advantage: Any
        ) -> torch.Tensor:
            drop = (
                len(log_probs)
                and advantage < 0
                and float((engine - log_probs.detach()).mean()) > 0.2
            )
            return torch.full((len(log_probs),), not drop)

        assert torch.equal(kept, case.each(one))
        masked += int((~kept).sum())
    assert masked > 100


@pytest.mark.slow
def test_the_unbiased_kl_is_weighted_by_the_ratio_and_has_the_gradient_of_the_divergence() -> None:
    """Against its formula; and in expectation over all tokens of a small vocabulary, where the
    gradient of the weighted estimate is that of the divergence, and that of k3 alone is not."""
    for seed in CASES:
        case = Case(seed)
        given = case.log_probs, case.reference, case.old
        delta = case.reference - case.log_probs
        ratio = (case.log_probs - case.old).exp()
        for kind, wanted in (("k1", -delta), ("k3", delta.exp() - delta - 1)):
            if len(case.log_probs):
                case.same(unbiased_kl(*given, kind), ratio * wanted)
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    logits = logits.requires_grad_()
    reference = reference.log_softmax(0)
    log_probs = logits.log_softmax(0)
    [divergence] = torch.autograd.grad(
        (log_probs.exp() * (log_probs - reference)).sum(), logits, retain_graph=True
    )
    estimates = [
        unbiased_kl(log_probs, reference, log_probs.detach(), kind) for kind in ("k1", "k3")
    ]
    estimates += [kl_penalty(log_probs, reference, kind) for kind in ("k1", "k3")]
    gradients = [
        torch.autograd.grad((one * log_probs.exp().detach()).sum(), logits, retain_graph=True)[0]
        for one in estimates
    ]
    for found in gradients[:2]:
        torch.testing.assert_close(found, divergence, **NEAR)
    assert all((found - divergence).abs().max() > 1e-2 for found in gradients[2:])


def test_masked_sequences_keep_their_kl_penalty_and_are_counted() -> None:
    case = next(
        case for case in map(Case, CASES) if (case.by_row < 0).all() and len(case.log_probs) > 3
    )
    case.columns["rollout_log_probs"] = case.log_probs.detach() + 1
    correction = RolloutCorrectionConfig(off_policy=0.5)
    loss = PolicyLoss(
        ActorConfig(kl_loss_coef=0.3, kl_loss_unbiased=True, rollout_correction=correction)
    )
    assert set(loss.columns) == {"response_mask", *case.columns}
    micro: Any = SimpleNamespace(lengths=torch.from_numpy(case.lengths), columns=case.columns)
    total, count, metrics = loss(case.log_probs, None, micro)
    penalty = loss.kl_loss(Tokens(case.log_probs, micro.lengths, case.columns)).sum()
    torch.testing.assert_close(total, 0.3 * penalty)
    assert count == len(case.log_probs) and metrics["rollout_correction/off_policy"][0] == count
    assert float(metrics["actor/pg_loss"][0]) == 0


def samples_of(seed: int, *, masked: bool = False) -> Samples:
    random = np.random.default_rng(seed)
    lengths = torch.from_numpy(random.integers(1, 6, random.integers(2, 9)))
    tokens = int(lengths.sum())
    rewards = torch.from_numpy(random.standard_normal(tokens))
    scores = torch.from_numpy(random.integers(0, 4, len(lengths)) / 3.0)
    groups = torch.from_numpy(random.integers(0, 3, len(lengths)))
    values = torch.from_numpy(random.standard_normal(tokens))
    mask = (
        torch.from_numpy(random.random(tokens) < 0.7)
        if masked
        else torch.ones(tokens, dtype=torch.bool)
    )
    return Samples(scores, rewards, groups, lengths, mask, {"values": values})


@pytest.mark.slow
def test_advantages_by_the_deviation_of_the_batch() -> None:
    for seed in CASES:
        samples = samples_of(seed)
        found, _ = grpo(samples, ScaledOptions(std="batch"))
        wanted = []
        for score, group in zip(samples.scores.tolist(), samples.groups.tolist(), strict=True):
            members = samples.scores[samples.groups == group]
            mean = float(members.mean()) if len(members) > 1 else 0.0
            wanted.append((score - mean) / (float(np.std(samples.scores.numpy(), ddof=1)) + 1e-6))
        expected = torch.tensor(wanted, dtype=torch.float64).repeat_interleave(samples.lengths)
        torch.testing.assert_close(found, expected, **NEAR)
        assert torch.equal(
            grpo(samples, ScaledOptions())[0], grpo(samples, ScaledOptions(std="group"))[0]
        )


@pytest.mark.slow
def test_a_critic_may_learn_from_returns_of_another_lambda() -> None:
    for seed in CASES:
        samples = samples_of(seed)
        (plain, _), (other, returns) = (
            gae_estimator(samples, GaeOptions(0.99, 0.9, lam)) for lam in (None, 1.0)
        )
        assert torch.equal(plain, other)
        wanted = []
        for row in torch.split(samples.rewards, samples.lengths.tolist()):
            to_go = 0.0
            discounted = []
            for reward in reversed(row.tolist()):
                to_go = reward + 0.99 * to_go
                discounted.insert(0, to_go)
            wanted += discounted
        torch.testing.assert_close(
            returns, torch.tensor(wanted, dtype=returns.dtype), rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.05, 0.5, 3.0])
def test_the_lambda_of_the_policy_may_follow_the_length_of_an_answer(alpha: float) -> None:
    for seed in CASES:
        samples = samples_of(seed, masked=True)
        found, returns = gae_estimator(samples, GaeOptions(0.99, 0.9, None, alpha))
        _, usual = gae_estimator(samples, GaeOptions(0.99, 0.9))
        wanted = []
        columns = samples.rewards, samples.columns["values"], samples.mask
        for row in zip(
            *(torch.split(column, samples.lengths.tolist()) for column in columns), strict=True
        ):
            rewards, values, mask = (column.tolist() for column in row)
            lam = 1 - 1 / max(alpha * sum(mask), 1.0)
            value = 0.0
            advantage = 0.0
            made = []
            for place in reversed(range(len(mask))):
                if mask[place]:
                    advantage = (
                        rewards[place] + 0.99 * value - values[place] + 0.99 * lam * advantage
                    )
                    value = values[place]
                made.insert(0, advantage if mask[place] else 0.0)
            wanted += made
        expected = whiten(torch.tensor(wanted, dtype=found.dtype), samples.mask)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(returns, usual)


@pytest.mark.parametrize("share", [0.2, 0.75, 1.0])
def test_the_tokens_of_highest_entropy_are_those_above_the_quantile(share: float) -> None:
    for seed in CASES:
        random = np.random.default_rng(seed)
        entropies = random.random(random.integers(1, 50))
        mask = random.random(50) < 0.7
        mask = mask[: len(entropies)]
        found = most_uncertain(torch.from_numpy(entropies), torch.from_numpy(mask), share)
        ordered = np.sort(entropies[mask])
        place = (len(ordered) - 1) * (1 - share)
        left = sum(int(rank >= place - 1e-9) for rank in range(len(ordered)))
        assert int(found.sum()) == left and not (found.numpy() & ~mask).any()
        assert set(entropies[found.numpy()]) == set(ordered[len(ordered) - left :])


@pytest.mark.slow
def test_turns_are_compared_with_those_that_began_in_the_same_state() -> None:
    """Against a loop over answers of up to three turns, whose environment shows one of two texts
    before a turn."""
    alone = 0
    for seed in CASES:
        random = np.random.default_rng(seed)
        gamma, weight, norm = (
            random.choice([1.0, 0.9]),
            random.choice([1.0, 0.5]),
            bool(random.integers(2)),
        )
        ids = []
        mask = []
        ends = []
        rewards = []
        lengths = []
        parts = []
        groups = random.integers(0, 2, 6)
        for row, group in enumerate(groups):
            length = 0
            for turn in range(random.integers(1, 4)):
                shown = [] if not turn else [[7, 8], [7, 9]][random.integers(2)]
                said = random.integers(1, 4)
                reward = float(random.integers(0, 3))
                ids += [*shown, *random.integers(0, 5, said)]
                mask += [False] * len(shown) + [True] * said
                ends += [False] * (len(shown) + said - 1) + [True]
                rewards += [0.0] * (len(shown) + said - 1) + [reward]
                length += len(shown) + said
                parts.append((row, group, tuple(shown) if turn else (), reward, said, len(shown)))
            lengths.append(length)

        def compared(
            value: float, all_values: list[float], single: float, norm: bool = norm
        ) -> float:
            if len(all_values) == 1:
                return single / (1 + 1e-6 if norm else 1)
            spread = np.std(all_values, ddof=1) + 1e-6 if norm else 1.0
            return (value - np.mean(all_values)) / spread if len(set(all_values)) > 1 else 0.0

        totals = [sum(one[3] for one in parts if one[0] == row) for row in range(6)]
        to_go = []
        for place, one in enumerate(parts):
            later = [other for other in parts[place:] if other[0] == one[0]]
            to_go.append(sum(gamma**k * other[3] for k, other in enumerate(later)))
        wanted: list[float] = []
        for place, (row, group, state, _, said, shown) in enumerate(parts):
            same = [to_go[k] for k, one in enumerate(parts) if one[1] == group and one[2] == state]
            alone += len(same) == 1
            value = compared(
                totals[row], [totals[k] for k in range(6) if groups[k] == group], totals[row]
            )
            value += weight * compared(to_go[place], same, 0.0)
            wanted += [0.0] * shown + [value] * said
        samples = Samples(
            torch.zeros(6),
            torch.zeros(len(ids)),
            torch.from_numpy(groups),
            torch.tensor(lengths),
            torch.tensor(mask),
            {"response_ids": torch.tensor(ids)},
            {},
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor(ends),
        )
        found, _ = gigpo(
            samples, GigpoOptions(norm_adv_by_std=norm, gamma=gamma, step_weight=weight)
        )
        torch.testing.assert_close(
            found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-8, atol=1e-8
        )
    assert alone > 20


def test_gigpo_without_rewards_of_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires a reward for each turn"):
        gigpo(samples_of(0), GigpoOptions())
