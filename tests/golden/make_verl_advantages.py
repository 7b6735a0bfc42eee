"""Writes `verl_advantages.json`: what verl 0.9.1 answers for GAE, whitening, the value loss and the
adaptive KL coefficient.

Needs the peer: `make bench NAME=gae` installs it beside the benchmarks. Run as
`PYTHONPATH=benchmarks/.cache/peer python tests/golden/make_verl_advantages.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from verl.trainer.ppo.core_algos import (
    AdaptiveKLController,
    compute_gae_advantage_return,
    compute_value_loss,
    kl_penalty,
)
from verl.utils.torch_functional import masked_mean

OUT = Path(__file__).with_name("verl_advantages.json")


def padded(rows: int, longest: int, seed: int, holes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Row lengths [rows] and the mask [rows, longest] of responses, with observation tokens in
    between when `holes`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    mask = (torch.arange(longest)[None] < lengths[:, None]).float()
    if holes:
        mask = mask * (torch.rand(mask.shape, generator=generator) < 0.7)
        mask[:, 0] = 1.0
    return lengths, mask


def cut(values: torch.Tensor, lengths: torch.Tensor) -> list[list[float]]:
    """The rows without padding."""
    return [row[:length].tolist() for row, length in zip(values, lengths.tolist(), strict=True)]


def advantages() -> list[dict[str, Any]]:
    """GAE with and without observation tokens."""
    cases = []
    for seed, (rows, longest, gamma, lam, holes) in enumerate(
        [
            (1, 5, 1.0, 1.0, False),
            (6, 9, 1.0, 0.95, False),
            (7, 12, 0.99, 0.9, False),
            (5, 8, 0.9, 0.0, False),
            (6, 10, 0.98, 0.95, True),
        ]
    ):
        lengths, mask = padded(rows, longest, seed, holes)
        generator = torch.Generator().manual_seed(100 + seed)
        inside = (torch.arange(longest)[None] < lengths[:, None]).float()
        rewards = torch.randn(rows, longest, generator=generator) * mask
        values = torch.randn(rows, longest, generator=generator) * inside
        whitened, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        cases.append(
            {
                "gamma": gamma,
                "lam": lam,
                "lengths": lengths.tolist(),
                "mask": cut(mask, lengths),
                "rewards": cut(rewards, lengths),
                "values": cut(values, lengths),
                "advantages": cut(whitened, lengths),
                "returns": cut(returns, lengths),
            }
        )
    return cases


def value_losses() -> list[dict[str, Any]]:
    """The clipped regression under each aggregation."""
    cases = []
    for seed, (clip, mode) in enumerate(
        [
            (0.5, "token-mean"),
            (0.1, "seq-mean-token-sum"),
            (0.2, "seq-mean-token-mean"),
            (1e9, "token-mean"),
        ]
    ):
        lengths, mask = padded(6, 7, 20 + seed, False)
        generator = torch.Generator().manual_seed(200 + seed)
        new, old, returns = (torch.randn(6, 7, generator=generator) for _ in range(3))
        loss, share = compute_value_loss(new, returns, old, mask, clip, mode)
        cases.append(
            {
                "clip": clip,
                "mode": mode,
                "lengths": lengths.tolist(),
                "new": cut(new, lengths),
                "old": cut(old, lengths),
                "returns": cut(returns, lengths),
                "loss": loss.item(),
                "clipfrac": share.item(),
            }
        )
    return cases


def penalised_rewards() -> list[dict[str, Any]]:
    """Three steps of a reward with a KL penalty whose coefficient follows the divergence, as
    `apply_kl_penalty` puts them together."""
    cases = []
    for kind in ("k1", "abs", "k2", "k3"):
        control = AdaptiveKLController(0.2, 0.1, 50)
        steps = []
        for step in range(3):
            lengths, mask = padded(4, 6, 40 + step, False)
            generator = torch.Generator().manual_seed(300 + step)
            old, reference = (-torch.rand(4, 6, generator=generator) for _ in range(2))
            scores = torch.zeros(4, 6)
            last = torch.randn(4, generator=generator)
            scores[torch.arange(4), lengths - 1] = last
            divergence = kl_penalty(old, reference, kind) * mask
            rewards = scores - control.value * divergence
            coefficient = control.value
            current = masked_mean(divergence, mask, axis=-1).mean(0).item()
            control.update(current, 4)
            steps.append(
                {
                    "lengths": lengths.tolist(),
                    "old": cut(old, lengths),
                    "reference": cut(reference, lengths),
                    "scores": last.tolist(),
                    "coefficient": coefficient,
                    "kl": current,
                    "rewards": cut(rewards, lengths),
                }
            )
        cases.append({"kind": kind, "steps": steps, "coefficient_after": control.value})
    return cases


if __name__ == "__main__":
    golden = {
        "peer": "verl 0.9.1",
        "gae": advantages(),
        "value_loss": value_losses(),
        "rewards": penalised_rewards(),
    }
    OUT.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
