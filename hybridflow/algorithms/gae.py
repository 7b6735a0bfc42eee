"""Token rewards become advantages and returns: generalised advantage estimation over packed rows.

T is the number of response tokens of a batch, rows one after another without padding; S the number of rows.
"""

from __future__ import annotations

import torch


def token_rewards(scores_S: torch.Tensor, penalty_T: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """[T] reward of each token: minus its penalty, and the score of the row at its last token. A row without tokens has
    no reward.

    Args:
        scores_S: [S] one score a row.
        penalty_T: [T] what is taken off at each token (coefficient times KL estimate, or zeros).
        lengths_S: [S] int64 tokens of each row.
    """
    rewards = -penalty_T.float()
    full = lengths_S > 0
    rewards[lengths_S.cumsum(0)[full] - 1] += scores_S.float()[full]
    return rewards


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
        [T] advantages, [T] returns; fp32.
    """
    rewards, values = rewards_T.float(), values_T.float()
    if mask_T is not None and not bool(mask_T.all()):
        row = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
        kept = torch.bincount(row[mask_T], minlength=len(lengths_S))
        advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
        advantages[mask_T], returns[mask_T] = gae(rewards[mask_T], values[mask_T], kept, gamma=gamma, lam=lam)
        return advantages, returns
    ends = lengths_S.cumsum(0)
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    following[ends[lengths_S > 0] - 1] = 0.0
    advantages = _discounted_sums(rewards + gamma * following - values, lengths_S, ends, gamma * lam)
    return advantages, advantages + values


def _discounted_sums(
    deltas_T: torch.Tensor, lengths_S: torch.Tensor, ends_S: torch.Tensor, factor: float
) -> torch.Tensor:
    """[T] sum over the rest of the row of factor^i deltas[t + i].

    Rows are walked from their ends side by side, longer ones first, so that those that reach one token further back are
    a prefix.
    """
    longest = int(lengths_S.max()) if len(lengths_S) else 0
    if longest < 2 or factor == 0.0:
        return deltas_T
    active = (len(lengths_S) - torch.bincount(lengths_S, minlength=longest + 1).cumsum(0)).tolist()
    place = ends_S[lengths_S.argsort(descending=True, stable=True)] - 1
    running, sums = torch.zeros(len(lengths_S), dtype=deltas_T.dtype), torch.empty_like(deltas_T)
    for step in range(longest):
        rows = active[step]
        here, total = place[:rows], running[:rows]
        total.mul_(factor).add_(deltas_T.index_select(0, here))
        sums.index_copy_(0, here, total)
        place.sub_(1)
    return sums


def whiten(values_T: torch.Tensor, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """[T] (x - mean) / sqrt(variance + 1e-8) over the tokens of the mask, with the unbiased variance; 0 elsewhere.

    One token alone has no variance and becomes 0. In fp64: of equal values, fp32 would leave rounding errors times 1e4.
    """
    chosen = (values_T if mask_T is None else values_T[mask_T]).double()
    centred = chosen - chosen.mean() if len(chosen) else chosen
    variance = (centred**2).sum() / max(len(chosen) - 1, 1)
    whitened = (centred * torch.rsqrt(variance + 1e-8)).to(values_T.dtype)
    if mask_T is None:
        return whitened
    out = torch.zeros_like(values_T)
    out[mask_T] = whitened
    return out
