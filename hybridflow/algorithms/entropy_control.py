"""Adaptive entropy bonus, whose coefficient is adjusted to keep the policy's entropy above a
target.
"""

from __future__ import annotations

import numpy as np
import torch


class EntropyControl:
    """The bonus coefficient. It is increased by `step` when the entropy is below `target`, and
    otherwise decreased by `step`, but not below 0. The bonus applies only while the entropy is
    below the target (Skywork-OR1, arXiv 2505.22312, section 4)."""

    def __init__(self, coefficient: float, target: float, step: float) -> None:
        self.value = coefficient
        self.target = target
        self.step = step

    def update(self, entropy: float) -> float:
        """Return the coefficient for a step whose sampled tokens have this mean entropy (in nats),
        and update it for the next step."""
        below = entropy < self.target
        now = self.value
        self.value = max(0.0, now + (self.step if below else -self.step))
        return now if below else 0.0


def most_uncertain(entropies_T: torch.Tensor, mask_T: torch.Tensor, share: float) -> torch.Tensor:
    """Return [T] bool: True for sampled tokens (`mask_T`) whose entropy is at least the (1 - share)
    quantile over all sampled tokens, with linear interpolation. These are the tokens at which
    reasoning forks ("Beyond the 80/20 Rule", arXiv 2506.01939, section 5)."""
    if not mask_T.any():
        return mask_T
    entropies = entropies_T.double()
    threshold = np.quantile(entropies[mask_T].numpy(), 1 - share)
    return mask_T & (entropies >= threshold)
