"""Writes `verl_algorithms.json`: what verl 0.9.1 answers for estimators, policy losses with their
gradients, KL estimates, aggregation and rollout correction, in float64.

The inputs are drawn by `drawn` from a seed, so that the file holds answers alone. Needs the peer
beside torch: `pip install --no-deps --target PEER verl==0.9.1 tensordict pyvers cloudpickle
codetiming`, then `PYTHONPATH=.:PEER python tests/golden/make_verl_algorithms.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from tests.golden.algorithm_inputs import CASES, LOSSES, REJECTIONS, Case, drawn

OUT = Path(__file__).with_name("verl_algorithms.json")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def cut(values: torch.Tensor, case: Case) -> list[float]:
    """Rows one after another without padding."""
    return [
        x
        for row, length in zip(values, case.lengths.tolist(), strict=True)
        for x in row[:length].tolist()
    ]


class Algorithm(dict):  # type: ignore[type-arg]
    """What estimators read of verl's AlgoConfig."""

    gamma = 0.9


def estimators(case: Case) -> dict[str, list[float]]:
    """Advantages of each estimator; pass@k where every group has two samples."""
    rewards = case.padded(case.rewards)
    mask = case.padded(case.mask.double())
    groups = case.groups.numpy()
    found = {}
    common = {"token_level_rewards": rewards, "response_mask": mask, "index": groups}
    names = ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "reinforce_plus_plus"]
    names += ["grpo_passk"] if min(np.unique(groups, return_counts=True)[1]) > 1 else []
    for name in names:
        given = {
            key: value.copy() if isinstance(value, np.ndarray) else value.clone()
            for key, value in common.items()
        }
        function = core_algos.get_adv_estimator_fn(name)
        found[name] = cut(
            function(**given, config=Algorithm(norm_adv_by_std_in_grpo=True))[0], case
        )
    dr_grpo = core_algos.get_adv_estimator_fn("grpo")
    found["dr_grpo"] = cut(
        dr_grpo(rewards.clone(), mask, groups, norm_adv_by_std_in_grpo=False)[0], case
    )
    remax = core_algos.get_adv_estimator_fn("remax")
    baseline = core_algos.get_adv_estimator_fn("tir_optimal_token_baseline")
    old = case.padded(case.old)
    squared = case.padded(case.sum_squared)
    found["optimal_token_baseline"] = cut(baseline(rewards, mask, groups, old, squared)[0], case)
    gdpo = core_algos.get_adv_estimator_fn("gdpo")
    inside = case.padded(torch.ones_like(case.lengths).repeat_interleave(case.lengths))
    batch = {"prompts": torch.zeros(len(groups), 0), "attention_mask": inside}
    options = {"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": [1.0, 0.5]}
    parts = dict(zip(options["gdpo_reward_keys"], case.parts.numpy(), strict=True))
    answer = gdpo(
        rewards,
        mask.float(),
        groups,
        config=Algorithm(options),
        non_tensor_batch=parts,
        batch=batch,
    )
    found["gdpo"] = cut(answer[0], case)
    found["remax"] = cut(remax(rewards, case.greedy, mask, config=Algorithm())[0], case)
    return found


def losses(case: Case) -> dict[str, Any]:
    """Loss and gradient of every policy loss, under its own aggregation or the token mean."""
    found = {}
    mask = case.padded(case.mask.double())
    old = case.padded(case.old)
    for name, (peer, mode, options) in LOSSES.items():
        policy = {key: value for key, value in options.items() if not key.startswith("clip_ratio")}
        clips = {key: value for key, value in options.items() if key.startswith("clip_ratio")}
        taus = {key: policy.pop(key) for key in list(policy) if key.startswith("tau_")}
        config = ActorConfig(
            strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(loss_mode=peer, **policy),
            **clips, **taus,
        )  # fmt: skip
        new = case.padded(case.new).requires_grad_()
        torch.manual_seed(0)
        if peer == "reinforce":
            advantages = case.padded(case.advantages)
            loss, _ = core_algos.compute_policy_loss_reinforce(
                old, new, advantages, mask, mode, config
            )
        else:
            function = core_algos.get_policy_loss_fn(peer)
            loss, _ = function(old, new, case.padded(case.advantages), mask, mode, config, None)
        (gradient,) = torch.autograd.grad(loss, new)
        found[name] = {"loss": loss.item(), "gradient": cut(gradient, case)}
    return found


def divergences(case: Case) -> dict[str, Any]:
    """KL estimates and their gradients, and the aggregations of the log-probs."""
    found: dict[str, Any] = {}
    mask = case.padded(case.mask.double())
    for kind in ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"):
        new = case.padded(case.new).requires_grad_()
        values = core_algos.kl_penalty(new, case.padded(case.old), kind)
        (gradient,) = torch.autograd.grad((values * mask).sum(), new)
        found[kind] = {"values": cut(values.detach() * mask, case), "gradient": cut(gradient, case)}
    for mode in MODES:
        options = {"loss_scale_factor": 7} if mode.endswith("norm") else {}
        found[mode] = core_algos.agg_loss(case.padded(case.new), mask, mode, **options).item()
    return found


def corrections(case: Case) -> dict[str, Any]:
    """Importance weights, kept tokens and the mismatch between two policies."""
    mask = case.padded(case.mask.double())
    ratio = case.padded(case.old - case.rollout)
    found: dict[str, Any] = {}
    for level in ("token", "sequence"):
        for name, threshold in (("truncated", 1.2), ("icepop", "0.8_1.2")):
            weights, _ = compute_rollout_correction_weights(ratio, mask, level, threshold)
            found[f"{level} {name}"] = cut(weights, case)
    for name, threshold in REJECTIONS.items():
        written = f"{threshold[0]}_{threshold[1]}" if isinstance(threshold, list) else threshold
        found[name] = cut(compute_rollout_rejection_mask(ratio, mask, name, written)[0], case)
    metrics = compute_offpolicy_metrics(case.padded(case.old), case.padded(case.rollout), mask)
    return found | {
        "kl": metrics["kl"],
        "k3_kl": metrics["k3_kl"],
        "chi2_token": metrics["chi2_token"],
    }


if __name__ == "__main__":
    answers = []
    for seed in range(CASES):
        case = drawn(seed)
        answers.append(
            {"estimators": estimators(case), "losses": losses(case), "kl": divergences(case)}
        )
        answers[-1]["corrections"] = corrections(case)
    OUT.write_text(
        json.dumps({"peer": "verl 0.9.1", "cases": answers}, separators=(",", ":")) + "\n"
    )
