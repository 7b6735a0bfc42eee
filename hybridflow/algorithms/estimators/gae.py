"""Generalised advantage estimation: token rewards and a critic's values become advantages and returns.

T is the number of response tokens of a batch, rows one after another without padding; S the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.algorithms.estimators.base import Samples, estimator
from hybridflow.algorithms.whitening import whiten

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GaeOptions:
    """`gamma` discounts a token; `lam` 1 sums the rewards to go, 0 looks one token ahead."""

    gamma: float = 1.0
    lam: float = 1.0


@estimator("gae", reads=("values",), needs_critic=True, options=GaeOptions)
def gae_estimator(samples: Samples, options: GaeOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Whitened advantages, and the returns that the critic learns from."""
    advantages, returns = gae(
        samples.rewards,
        samples.columns["values"],
        samples.lengths,
        gamma=options.gamma,
        lam=options.lam,
        mask_T=samples.mask,
    )
    return whiten(advantages, samples.mask), returns


def gae(
    rewards_T: torch.Tensor,
    values_T: torch.Tensor,
    lengths_S: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    mask_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (arXiv 1506.02438, eq. 16), not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 behind the end of a row; A_t = delta_t + gamma lam A_{t+1}; return_t
    = A_t + V_t.

    Args:
        rewards_T, values_T: [T] reward of each token, and value of the state it was sampled in.
        lengths_S: [S] int64 tokens of each row.
        mask_T: [T] bool, false for tokens the policy did not sample (observations): they are skipped, so that the next
            value and the running sum reach over them, and their own advantage and return are 0. None: all were sampled.

    Returns:
        [T] advantages, [T] returns.
    """
    rewards, values = rewards_T, values_T.to(rewards_T.dtype)
    if mask_T is not None and not bool(mask_T.all()):
        row = (lengths_S.new_ones(len(lengths_S)).cumsum(0) - 1).repeat_interleave(lengths_S)
        kept = row[mask_T].bincount(minlength=len(lengths_S))
        advantages, returns = values.new_zeros(values.shape), values.new_zeros(values.shape)
        advantages[mask_T], returns[mask_T] = gae(rewards[mask_T], values[mask_T], kept, gamma=gamma, lam=lam)
        return advantages, returns
    ends = lengths_S.cumsum(0)
    following = values.new_zeros(values.shape)
    following[:-1] = values[1:]
    following[ends[lengths_S > 0] - 1] = 0.0
    advantages = _discounted_sums(rewards + gamma * following - values, lengths_S, ends, gamma * lam)
    return advantages, advantages + values


def discounted_returns(
    rewards_T: torch.Tensor, lengths_S: torch.Tensor, mask_T: torch.Tensor, gamma: float
) -> torch.Tensor:
    """[T] G_t = r_t + gamma G_{t+1} over the tokens of the mask in each row, which skips the others; 0 at those."""
    return gae(rewards_T, rewards_T * 0.0, lengths_S, gamma=gamma, lam=1.0, mask_T=mask_T)[0]


def _discounted_sums(
    deltas_T: torch.Tensor, lengths_S: torch.Tensor, ends_S: torch.Tensor, factor: float
) -> torch.Tensor:
    """[T] sum over the rest of the row of factor^i deltas[t + i].

    Rows are walked from their ends in step with each other, longer ones first, so that those that reach one token
    further back are a prefix.
    """
    longest = int(lengths_S.max()) if len(lengths_S) else 0
    if longest < 2 or factor == 0.0:
        return deltas_T
    active = (len(lengths_S) - lengths_S.bincount(minlength=longest + 1).cumsum(0)).tolist()
    place = ends_S[lengths_S.argsort(descending=True, stable=True)] - 1
    running, sums = deltas_T.new_zeros(len(lengths_S)), deltas_T.new_empty(deltas_T.shape)
    for step in range(longest):
        rows = active[step]
        here, total = place[:rows], running[:rows]
        total.mul_(factor).add_(deltas_T.index_select(0, here))
        sums.index_copy_(0, here, total)
        place.sub_(1)
    return sums
