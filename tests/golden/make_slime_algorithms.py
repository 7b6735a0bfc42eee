"""Writes `slime_algorithms.json`: what slime's own losses and estimators make of the batches of
`drawn`, in float64: losses with their gradients in the new log-probs, and whitened advantages.

Needs `git archive 624b824a898ab0ec1fcb4d373004c7f3852bf515 slime` of THUDM/slime in a folder SLIME,
beside Megatron: `TORCHDYNAMO_DISABLE=1 PYTHONPATH=.:SLIME python
tests/golden/make_slime_algorithms.py`.

slime computes divergences and whitening in float32 whatever it is given; here its `float32` is
float64.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from slime.backends.megatron_utils import loss as slime
from slime.utils import distributed_utils, ppo_utils

from hybridflow.algorithms.estimators.base import sums_of_rows
from tests.golden.algorithm_inputs import PEER_CASES, Case, drawn, projected

OUT = Path(__file__).with_name("slime_algorithms.json")
BASE: dict[str, Any] = {
    **{
        "rollout_top_p": 1.0,
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
    },
    **{
        "use_rollout_logprobs": False,
        "use_opsm": False,
        "opsm_delta": 0.02,
        "get_mismatch_metrics": False,
    },
    **{
        "use_tis": False,
        "custom_tis_function_path": None,
        "tis_clip_low": 0.0,
        "tis_clip": 1.2,
        "use_kl_loss": False,
    },
    **{
        "use_unbiased_kl": False,
        "kl_loss_type": "k3",
        "kl_loss_coef": 0.3,
        "calculate_per_token_loss": False,
    },
}
_CORRECTION = "slime.backends.megatron_utils.loss.icepop_function"
# form of a loss: slime's options that differ from BASE
FORMS: dict[str, dict[str, Any]] = {
    "ppo": {"eps_clip_c": 3.0},
    "ppo, a mean of tokens": {"eps_clip_c": 3.0, "calculate_per_token_loss": True},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.1, "eps_clip_high": 0.2},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0},
    "off-policy masks": {"use_opsm": True, "use_rollout_logprobs": True},
    **{f"kl {kind}": {"use_kl_loss": True, "kl_loss_type": kind} for kind in ("k1", "k2", "k3")},
    **{
        f"unbiased {kind}": {"use_kl_loss": True, "kl_loss_type": kind, "use_unbiased_kl": True}
        for kind in ("k1", "k3")
    },
    "truncated weights": {"use_tis": True},
    "icepop": {"use_tis": True, "tis_clip_low": 0.8, "custom_tis_function_path": _CORRECTION},
    "entropy": {"entropy_coef": 0.1},
}


class _Double:
    """torch, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def alone() -> None:
    """One rank without parallelism, in float64."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    slime.mpu.initialize_model_parallel()
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    slime.torch = distributed_utils.torch = ppo_utils.torch = _Double()
    # the log-probs are given in place of logits, and the entropy of a token is minus its log-prob
    slime.get_log_probs_and_entropy = lambda rows, **_: (
        None,
        {"log_probs": rows, "entropy": [-row for row in rows]},
    )


def loss_of(form: dict[str, Any], case: Case, seed: int) -> tuple[float, float]:
    """The mean loss over sequences or tokens that were sampled, and its projected gradient."""
    args = Namespace(**{**BASE, **form})
    lengths = case.lengths.tolist()
    new = case.new.clone().requires_grad_()

    def rows(values: torch.Tensor) -> list[torch.Tensor]:
        return list(values.split(lengths))

    masks = rows(case.mask.double())
    names = {
        "advantages": case.advantages,
        "log_probs": case.old,
        "rollout_log_probs": case.rollout,
    }
    batch: dict[str, Any] = {
        name: rows(values) for name, values in {**names, "ref_log_probs": case.reference}.items()
    }
    batch |= {
        "response_lengths": lengths,
        "total_lengths": lengths,
        "unconcat_tokens": None,
        "loss_masks": masks,
    }
    batch["rollout_mask_sums"] = [mask.sum() for mask in masks]
    reduce = slime.get_sum_of_sample_mean(
        lengths, lengths, masks, None, args.calculate_per_token_loss
    )
    total, _ = slime.policy_loss_function(args, batch, rows(new), reduce)
    sampled = sums_of_rows(case.mask.long(), case.lengths)
    loss = total / (sampled if args.calculate_per_token_loss else sampled > 0).sum()
    (gradient,) = torch.autograd.grad(loss, new)
    return projected(loss, seed), projected(gradient, seed)


def advantages_of(name: str, case: Case, seed: int) -> float:
    """Projected advantages of answers without observations: of rewards less 0.05 times the
    divergence, whitened."""
    lengths = case.lengths.tolist()
    options = {"kl_coef": 0.05, "kl_loss_type": "k1", "gamma": 0.9, "lambd": 0.8}
    flags = {
        "use_rollout_logprobs": False,
        "custom_advantage_function_path": None,
        "use_opd": False,
    }
    args = Namespace(advantage_estimator=name, normalize_advantages=True, **options, **flags)
    data: dict[str, Any] = {
        "log_probs": list(case.old.split(lengths)),
        "ref_log_probs": list(case.reference.split(lengths)),
        "values": list(case.new.split(lengths)),
        "rewards": case.parts[0].tolist(),
        "loss_masks": [torch.ones(length) for length in lengths],
        **{"response_lengths": lengths, "total_lengths": lengths},
    }
    slime.compute_advantages_and_returns(args, data)
    return projected(torch.cat(data["advantages"]), seed)


if __name__ == "__main__":
    alone()
    seeds = range(PEER_CASES)
    losses = {
        name: [loss_of(form, drawn(seed), seed) for seed in seeds] for name, form in FORMS.items()
    }
    advantages = {
        ours: [advantages_of(theirs, drawn(seed), seed) for seed in seeds]
        for ours, theirs in (("gae", "ppo"), ("reinforce_plus_plus", "reinforce_plus_plus"))
    }
    found = {"peer": "slime 624b824a", "losses": losses, "advantages": advantages}
    OUT.write_text(json.dumps(found, separators=(",", ":")) + "\n")
