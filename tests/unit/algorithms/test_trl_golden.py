"""Off-policy sequence masks, VESPO with its gradient, and tokens of high entropy against TRL 1.16.0, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.entropy_control import most_uncertain
from hybridflow.algorithms.policy_losses.base import Tokens
from hybridflow.algorithms.policy_losses.vespo import VespoOptions, vespo
from hybridflow.algorithms.rewards import sums_of_rows
from hybridflow.algorithms.rollout_correction import on_policy_tokens
from tests.golden.algorithm_inputs import CASES, TRL_OPTIONS, drawn

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl_algorithms.json").read_text())["cases"]


@pytest.mark.parametrize("seed", range(CASES))
def test_sequences_are_kept_as_trl_keeps_them(seed: int) -> None:
    case = drawn(seed)
    lengths = sums_of_rows(case.mask.long(), case.lengths)
    columns = (column[case.mask] for column in (case.new, case.rollout, case.advantages))
    kept = on_policy_tokens(*columns, lengths, TRL_OPTIONS["most"])
    wanted = torch.tensor(GOLDEN[seed]["kept"]).repeat_interleave(case.lengths)[case.mask]
    assert torch.equal(kept, wanted)
    assert sum(row is False for one in GOLDEN for row in one["kept"]) > 3


@pytest.mark.parametrize("k_neg", TRL_OPTIONS["k_neg"])
@pytest.mark.parametrize("seed", range(CASES))
def test_weights_of_vespo_and_its_gradient_equal_trls(seed: int, k_neg: float) -> None:
    case = drawn(seed)
    weights = torch.tensor(GOLDEN[seed]["weights"][str(k_neg)], dtype=torch.float64).repeat_interleave(case.lengths)
    columns = {"old_log_probs": case.old[case.mask], "advantages": case.advantages[case.mask]}
    new = case.new.clone().requires_grad_()
    tokens = Tokens(new[case.mask], sums_of_rows(case.mask.long(), case.lengths), columns)
    loss, metrics = vespo(tokens, VespoOptions(k_neg=k_neg))
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(metrics["actor/vespo_weight"], weights[case.mask], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(gradient, (-weights * case.advantages).where(case.mask, 0.0), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", range(CASES))
def test_tokens_of_high_entropy_are_trls(seed: int) -> None:
    case = drawn(seed)
    found = most_uncertain(-case.new, case.mask, TRL_OPTIONS["share"])
    assert found.tolist() == GOLDEN[seed]["high"] and 0 < int(found.sum()) < int(case.mask.sum())
