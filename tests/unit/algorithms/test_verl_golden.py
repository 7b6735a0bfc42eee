"""Estimators, losses, KL estimates, aggregation and rollout correction against verl 0.9.1: values
and gradients to 1e-6 in float64 on jagged batches with observations, samples of one token, and a
sample that is masked throughout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.algorithms.estimators.base import Samples, sums_of_rows
from hybridflow.algorithms.losses import aggregate, kl_penalty
from hybridflow.algorithms.policy_losses.base import Tokens
from hybridflow.algorithms.rollout_correction import importance_weights, kept_tokens
from hybridflow.config.entries import ESTIMATORS, POLICY_LOSSES
from hybridflow.trainer.mismatch import divergences, ratio_sums
from tests.golden.algorithm_inputs import CASES, LOSSES, REJECTIONS, Case, drawn

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "verl_algorithms.json").read_text())[
    "cases"
]
# verl's names of options whose names differ here
OPTIONS = {
    "dro_beta": "beta",
    "kl_cov_ratio": "share",
    "clip_cov_ratio": "share",
    "clip_cov_lb": "lower",
}
OPTIONS |= {"clip_cov_ub": "upper"}


def close(found: torch.Tensor, expected: list[float], mask: torch.Tensor | None = None) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        found.double(), wanted if mask is None else wanted[mask], rtol=1e-6, atol=1e-6
    )


def samples_of(case: Case, columns: dict[str, torch.Tensor] | None = None) -> Samples:
    scores = sums_of_rows(case.rewards, case.lengths)
    parts = dict(zip(("first", "second"), case.parts, strict=True))
    return Samples(scores, case.rewards, case.groups, case.lengths, case.mask, columns or {}, parts)


def tokens_of(case: Case, log_probs: torch.Tensor) -> Tokens:
    lengths = sums_of_rows(case.mask.long(), case.lengths)
    columns = {"old_log_probs": case.old[case.mask], "advantages": case.advantages[case.mask]}
    return Tokens(log_probs[case.mask], lengths, columns)


@pytest.mark.parametrize("seed", range(CASES))
def test_estimators(seed: int) -> None:
    case = drawn(seed)
    expected = GOLDEN[seed]["estimators"]
    for name, wanted in expected.items():
        entry = ESTIMATORS.get("grpo" if name == "dr_grpo" else name)
        options: dict[str, Any] = {"gamma": 0.9} if name == "reinforce_plus_plus" else {}
        options |= {"norm_adv_by_std": False} if name == "dr_grpo" else {}
        options |= {"rewards": ("first", "second"), "weights": (1.0, 0.5)} if name == "gdpo" else {}
        columns = {
            "greedy_scores": case.greedy,
            "old_log_probs": case.old,
            "sum_pi_squared": case.sum_squared,
        }
        advantages, _ = entry.function(samples_of(case, columns), entry.options(**options))
        close(advantages[case.mask], wanted, case.mask)
        # verl's ReMax leaves returns at observations, which no loss reads
        assert not advantages[~case.mask].any()


def loss_of(name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The aggregated loss and its gradient in all tokens [T]."""
    _, mode, given = LOSSES[name]
    options = {OPTIONS.get(key, key): value for key, value in given.items()}
    if name.startswith("dppo"):
        options["largest_weight"] = options.pop("clip_ratio_c")
    entry = POLICY_LOSSES.get(name)
    new = case.new.clone().requires_grad_()
    tokens = tokens_of(case, new)
    loss, _ = entry.function(tokens, entry.options(**options))
    total, count = aggregate(loss, tokens.lengths, mode)
    (gradient,) = torch.autograd.grad(total / count, new)
    return (total / count).detach(), gradient


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(CASES))
def test_policy_losses(seed: int, name: str) -> None:
    case = drawn(seed)
    expected = GOLDEN[seed]["losses"][name]
    loss, gradient = loss_of(name, case)
    wanted = torch.tensor(expected["gradient"], dtype=torch.float64)
    wanted_loss = expected["loss"]
    if name == "gmpo":  # verl counts sequences without a sampled token in its mean (ADR 0030)
        sampled = sums_of_rows(case.mask.long(), case.lengths) > 0
        share = float(len(sampled) / sampled.sum())
        wanted = wanted * share
        wanted_loss = wanted_loss * share
    assert float(loss) == pytest.approx(wanted_loss, abs=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(CASES))
def test_divergences_and_aggregation(seed: int) -> None:
    case = drawn(seed)
    expected = GOLDEN[seed]["kl"]
    lengths = sums_of_rows(case.mask.long(), case.lengths)
    for kind in ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"):
        new = case.new.clone().requires_grad_()
        values = kl_penalty(new, case.old, kind)[case.mask]
        (gradient,) = torch.autograd.grad(values.sum(), new)
        close(values.detach(), expected[kind]["values"], case.mask)
        close(gradient, expected[kind]["gradient"])
    for mode in (
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ):
        total, count = aggregate(case.new[case.mask], lengths, mode, 7)
        assert float(total / count) == pytest.approx(expected[mode], abs=1e-6)


@pytest.mark.parametrize("seed", range(CASES))
def test_rollout_correction(seed: int) -> None:
    case = drawn(seed)
    expected = GOLDEN[seed]["corrections"]
    lengths = sums_of_rows(case.mask.long(), case.lengths)
    ratio = (case.old - case.rollout)[case.mask]
    for level in ("token", "sequence"):
        close(
            importance_weights(ratio, lengths, level, 1.2, None),
            expected[f"{level} truncated"],
            case.mask,
        )
        close(
            importance_weights(ratio, lengths, level, 1.2, 0.8),
            expected[f"{level} icepop"],
            case.mask,
        )
    rejected = 0
    for name, bound in REJECTIONS.items():
        kept = kept_tokens(ratio, lengths, {name: bound})
        close(kept, expected[name], case.mask)
        rejected += int((~kept).sum())
    assert rejected
    found = divergences(ratio_sums(case.rollout[case.mask].numpy(), case.old[case.mask].numpy()))
    for ours, theirs in {"kl": "kl", "k3": "k3_kl", "chi2": "chi2_token"}.items():
        assert found[ours] == pytest.approx(expected[theirs], abs=1e-6)
