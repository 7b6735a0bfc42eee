"""Random jagged batches in float64 that the makers of the golden answers and their tests draw
alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

CASES = 4
PEER_CASES = 200  # of TRL and slime
# our loss: (verl's, aggregation, options of both by verl's names)
LOSSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": (
        "vanilla",
        "token-mean",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
    ),
    "gspo": ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    "sapo": ("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": ("geo_mean", "seq-mean-token-mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "dro": ("dro", "seq-mean-token-sum", {"dro_beta": 0.3}),
    "gpg": ("gpg", "token-mean", {}),
    "reinforce": ("reinforce", "seq-mean-token-sum", {}),
    "kl_cov": ("kl_cov", "token-mean", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}),
    "clip_cov": (
        "clip_cov",
        "token-mean",
        {
            "clip_cov_ratio": 0.9,
            "clip_cov_lb": 0.1,
            "clip_cov_ub": 5.0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.2,
        },
    ),
    "dppo_tv": (
        "dppo_tv",
        "token-mean",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 2.0},
    ),
    "dppo_kl": (
        "dppo_kl",
        "token-mean",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 2.0},
    ),
}
# bounds of rejection; two: of the ratio engine / trainer
REJECTIONS: dict[str, Any] = {
    "token_k1": [0.8, 1.25],
    "token_k2": 0.05,
    "token_k3": 0.05,
    "seq_sum_k1": [0.8, 1.25],
    "seq_sum_k2": 0.2,
    "seq_sum_k3": 0.2,
    "seq_mean_k1": [0.95, 1.05],
    "seq_mean_k2": 0.04,
    "seq_mean_k3": 0.04,
    "seq_max_k2": 0.1,
    "seq_max_k3": 0.1,
}


@dataclass(frozen=True)
class Case:
    """B samples in groups, one of them alone in the odd cases; T tokens. Each sample's first token
    is sampled, save in the last sample of case 2, which is masked throughout; samples of length 1
    and observations in the middle occur."""

    lengths: torch.Tensor
    groups: torch.Tensor
    mask: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    greedy: torch.Tensor
    sum_squared: torch.Tensor  # of the probabilities at each token
    parts: torch.Tensor  # [2, B] whole numbers: two rewards of each sample
    reference: torch.Tensor

    def by_row(self) -> torch.Tensor:
        """[B] the advantage of each sample."""
        return self.advantages[self.lengths.cumsum(0) - 1]

    def padded(self, values_T: torch.Tensor) -> torch.Tensor:
        """[B, longest], 0 in the padding."""
        rows = values_T.split(self.lengths.tolist())
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def drawn(seed: int) -> Case:
    """The batch of a seed."""
    random = np.random.default_rng(seed)
    groups = np.array([7, 3, 7, 3, 7, 3, 5, 5] + ([9] if seed % 2 else []))
    lengths = random.integers(1, 8, len(groups))
    lengths[1], total = 1, 0
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    mask = random.random(total) < 0.75
    mask[starts] = True
    if seed == 2:
        mask[starts[-1] :] = False
    rewards = np.where(mask, random.normal(0, 0.1, total), 0.0)
    rewards[starts] += random.integers(0, 3, len(groups))
    new = -random.exponential(1.0, total)
    old = np.zeros(0)
    old = np.minimum(new + random.normal(0, 0.25, total), -1e-3)
    rollout = old + random.normal(0, 0.2, total)
    advantages = np.repeat(random.normal(0, 1, len(groups)), lengths)
    greedy = random.normal(0, 1, len(groups))
    others = random.random(total)
    sum_squared = np.exp(2 * old) + others * (1 - np.exp(old)) ** 2
    parts = random.integers(0, 3, (2, len(groups))).astype(float)
    reference = np.minimum(new + random.normal(0, 0.4, total), -1e-3)
    columns = (
        lengths,
        groups,
        mask,
        rewards,
        advantages,
        new,
        old,
        rollout,
        greedy,
        sum_squared,
        parts,
        reference,
    )
    return Case(*(torch.tensor(values) for values in columns))


def scores_of_groups(seed: int) -> torch.Tensor:
    """[12] the scores of three groups of four, of which one is all equal in every third batch."""
    scores = np.random.default_rng([seed, 1]).integers(0, 4, 12) / 3.0
    scores[:4] = scores[0] if seed % 3 == 0 else scores[:4]
    return torch.tensor(scores)


def projected(values: torch.Tensor, seed: int) -> float:
    """The product of the values with a random vector of their length, in 13 digits: 200 cases of
    many tokens in a small file, in which no other value of any token goes unnoticed."""
    weights = np.random.default_rng([seed, 2, values.numel()]).standard_normal(values.numel())
    return float(f"{float(values.detach().double().reshape(-1) @ torch.tensor(weights)):.13g}")
