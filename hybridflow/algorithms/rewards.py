"""Conversion of row scores and token penalties to token rewards.

T is the number of response tokens in a batch, with rows concatenated without padding; S is the
number of rows. Calls only tensor methods, because estimators and losses, which must not import
torch, also use this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def token_rewards(
    scores_S: torch.Tensor,
    penalty_T: torch.Tensor,
    lengths_S: torch.Tensor,
    mask_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T] rewards: the negative penalty of each token, plus the row's score at its last
    sampled token. A row without a sampled token has no reward.

    Args:
        scores_S: [S] scores, one per row.
        penalty_T: [T] subtracted from each token's reward (coefficient times KL estimate, or
            zeros).
        lengths_S: [S] int64 number of tokens in each row.
        mask_T: [T] bool, True for tokens sampled by the policy; None means all of them.
    """
    rewards = -penalty_T.float()
    row = rows_of_tokens(lengths_S)
    place = row.new_ones(len(row)).cumsum(0) - 1
    if mask_T is not None:
        row = row[mask_T]
        place = place[mask_T]
    last = lengths_S.new_full(lengths_S.shape, -1).scatter_reduce_(0, row, place, "amax")
    rewards[last[last >= 0]] += scores_S.float()[last >= 0]
    return rewards


def overlong_penalties(
    lengths_S: torch.Tensor, limit: int, buffer: int, penalty: float
) -> torch.Tensor:
    """Return [S] penalties for long answers: 0 up to `limit - buffer` tokens, then linear to
    `penalty` at `limit`.

    DAPO (arXiv 2503.14476), equation 13: soft overlong punishment.
    """
    return ((lengths_S - (limit - buffer)) / buffer).clamp(min=0.0) * penalty


def sums_of_rows(values_T: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tokens of each row, [S]."""
    return values_T.new_zeros(len(lengths_S)).index_add(0, rows_of_tokens(lengths_S), values_T)


def rows_of_tokens(lengths_S: torch.Tensor) -> torch.Tensor:
    """Return [T] the row index of each token."""
    return (lengths_S.new_ones(len(lengths_S)).cumsum(0) - 1).repeat_interleave(lengths_S)
