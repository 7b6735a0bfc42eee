"""Losses, with their gradients, and advantages against TRL 1.16.0 and slime: 200 random batches of
each, in float64, with observations, sequences of one token, and a sequence that is masked
throughout."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms.entropy_control import most_uncertain
from hybridflow.algorithms.estimators.base import Samples, sums_of_rows
from hybridflow.algorithms.estimators.gae import GaeOptions
from hybridflow.algorithms.estimators.grpo import ScaledOptions, grpo
from hybridflow.algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlusOptions
from hybridflow.config.entries import ESTIMATORS
from hybridflow.config.schema import ActorConfig
from hybridflow.config.schema_rewards import RolloutCorrectionConfig
from hybridflow.workers.losses import PolicyLoss
from tests.golden.algorithm_inputs import PEER_CASES, Case, drawn, projected, scores_of_groups

FOLDER = Path(__file__).parents[2] / "golden"
GOLDEN = {
    name: json.loads((FOLDER / f"{name}_algorithms.json").read_text()) for name in ("trl", "slime")
}
PPO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": None}
GSPO = {"policy_loss": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
CISPO = {"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.28}
KL = {**PPO, "kl_loss_coef": 0.3}
OF_SEQUENCES = {"loss_agg_mode": "seq-mean-token-mean"}
MASKED = {**PPO, "rollout_correction": RolloutCorrectionConfig(off_policy=0.02)}
# the peer, a form of a loss: our settings of the section `actor`
FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("trl", "ppo"): PPO,
    ("trl", "gspo"): GSPO,
    ("trl", "cispo"): CISPO,
    ("trl", "sapo"): {"policy_loss": "sapo", **OF_SEQUENCES},
    ("trl", "vespo"): {"policy_loss": "vespo"},
    ("trl", "vespo, k_neg 1"): {"policy_loss": "vespo", "policy_loss_options": {"k_neg": 1.0}},
    ("trl", "kl"): KL,
    ("trl", "unbiased kl"): {**KL, "kl_loss_unbiased": True},
    ("trl", "off-policy masks"): MASKED,
    ("trl", "top entropy"): PPO,
    ("slime", "ppo"): {**PPO, **OF_SEQUENCES, "clip_ratio_c": 3.0},
    ("slime", "ppo, a mean of tokens"): {**PPO, "clip_ratio_c": 3.0},
    ("slime", "gspo"): {**GSPO, **OF_SEQUENCES},
    ("slime", "cispo"): {**CISPO, **OF_SEQUENCES},
    ("slime", "off-policy masks"): {**MASKED, **OF_SEQUENCES},
    **{
        ("slime", f"kl {kind}"): {**KL, **OF_SEQUENCES, "kl_loss_type": kind}
        for kind in ("k1", "k2", "k3")
    },
    **{
        ("slime", f"unbiased {kind}"): {
            **KL,
            **OF_SEQUENCES,
            "kl_loss_type": kind,
            "kl_loss_unbiased": True,
        }
        for kind in ("k1", "k3")
    },
    ("slime", "truncated weights"): {
        **PPO,
        **OF_SEQUENCES,
        "rollout_correction": RolloutCorrectionConfig(weight="token", upper=1.2),
    },
    ("slime", "icepop"): {
        **PPO,
        **OF_SEQUENCES,
        "rollout_correction": RolloutCorrectionConfig(weight="token", upper=1.2, lower=0.8),
    },
    ("slime", "entropy"): {**PPO, **OF_SEQUENCES, "entropy_coef": 0.1},
}


def test_every_form_of_a_peer_is_compared() -> None:
    assert set(FORMS) == {
        (peer, name) for peer, golden in GOLDEN.items() for name in golden["losses"]
    }


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "form"), FORMS)
def test_losses_and_gradients(peer: str, form: str) -> None:
    old = "rollout_log_probs" if (peer, form) == ("slime", "off-policy masks") else "old_log_probs"
    loss = PolicyLoss(ActorConfig(**FORMS[peer, form]), old)
    found = []
    wanted = GOLDEN[peer]["losses"][form]
    for seed in range(PEER_CASES):
        case = drawn(seed)
        new = case.new.clone().requires_grad_()
        mask = case.mask
        columns = {
            "old_log_probs": case.old,
            "rollout_log_probs": case.rollout,
            "ref_log_probs": case.reference,
        }
        columns["advantages"] = case.advantages
        if form == "top entropy":
            columns["advantages"] = case.advantages * most_uncertain(-case.new, mask, 0.2)
        sampled = SimpleNamespace(
            lengths=sums_of_rows(mask.long(), case.lengths),
            columns={name: values[mask] for name, values in columns.items()},
        )
        total, count, _ = loss(new[mask], -new[mask], sampled)
        (gradient,) = torch.autograd.grad(total / count, new)
        # TRL counts a sequence without a sampled token in its mean of sequences (ADR 0030)
        share = (
            float((sampled.lengths > 0).double().mean()) if (peer, form) == ("trl", "sapo") else 1.0
        )
        found.append([projected(share * total / count, seed), projected(share * gradient, seed)])
    assert np.allclose(found, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("scaled", ["group", "batch", "none"])
def test_scores_are_scaled_as_trl_scales_them(scaled: str) -> None:
    """Its deviations have 1e-4 added, ours 1e-6."""
    options = ScaledOptions(
        norm_adv_by_std=scaled != "none", std="batch" if scaled == "batch" else "group"
    )
    found = []
    for seed in range(PEER_CASES):
        scores = scores_of_groups(seed)
        groups = torch.arange(3).repeat_interleave(4)
        ones = torch.ones(12, dtype=torch.int64)
        advantages, _ = grpo(Samples(scores, scores, groups, ones, ones.bool(), {}), options)
        spread = scores.std() if scaled == "batch" else scores.view(3, 4).std(dim=1)[groups]
        found.append(
            projected(
                advantages * (1 if scaled == "none" else (spread + 1e-6) / (spread + 1e-4)), seed
            )
        )
    assert np.allclose(found, GOLDEN["trl"]["advantages"][scaled], rtol=1e-8, atol=1e-8)


def rewards_of(case: Case) -> torch.Tensor:
    rewards = -0.05 * (case.old - case.reference)
    rewards[case.lengths.cumsum(0) - 1] += case.parts[0]
    return rewards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("gae", GaeOptions(0.9, 0.8)), ("reinforce_plus_plus", ReinforcePlusPlusOptions(0.9))],
)
def test_advantages_of_slime(name: str, options: Any) -> None:
    """The scans over tokens are kernels in float32."""
    found = []
    for seed in range(PEER_CASES):
        case = drawn(seed)
        everything = torch.ones_like(case.mask)
        columns = {"values": case.new}
        samples = Samples(
            case.parts[0], rewards_of(case), case.groups, case.lengths, everything, columns
        )
        advantages, _ = ESTIMATORS.get(name).function(samples, options)
        found.append(projected(advantages, seed))
    assert np.allclose(found, GOLDEN["slime"]["advantages"][name], rtol=1e-5, atol=2e-5)
