"""Aggregation of token losses, and KL penalties, for packed response tokens.

Losses return (sum, count). The sums are scaled in a single place, by the global count over
data-parallel ranks and micro-batches, so the gradient does not depend on how the batch was split.
If that count is 0, the sum is not scaled. T is the number of response tokens of a micro-batch, S
its number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from hybridflow.algorithms.rewards import sums_of_rows

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]

# columns [T, k] with the teacher's most likely tokens. The last column is added by the backend if
# the micro-batch has the ids: the policy's log-probs of these tokens, with gradient
TEACHER_LOG_PROBS = "teacher_top_log_probs"
TEACHER_IDS = "teacher_top_ids"
OF_TEACHER = "policy_of_teacher_top"


class ResponseTokens(Protocol):
    """The part of a micro-batch that a loss reads in addition to the model's outputs."""

    @property
    def lengths(self) -> torch.Tensor:
        """Number of response tokens in each sequence, [S]."""

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The batch columns [T, ...], keyed by name, with one entry per response token."""


# (log-probs [T], entropies [T] or None, micro-batch) -> (loss sum, count, metric sums with counts)
LossFunction = Callable[
    [torch.Tensor, torch.Tensor | None, ResponseTokens], tuple[torch.Tensor, torch.Tensor, Metrics]
]


def aggregate(
    values_T: torch.Tensor, lengths_S: torch.Tensor, mode: str, norm: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Aggregate per-token values to (sum, count). The global loss is sum / max(count, 1) over all
    micro-batches and ranks.

    Args:
        values_T: [T] per-token values, sequences concatenated.
        lengths_S: [S] number of response tokens per sequence; sequences of length 0 are ignored.
        mode: token-mean | token-sum, with a count of 0 | seq-mean-token-sum | seq-mean-token-mean |
            seq-mean-token-sum-norm.
        norm: the constant divisor of seq-mean-token-sum-norm (Dr.GRPO, arXiv 2503.20783, section
            3.2).
    """
    if mode == "token-mean":
        return values_T.sum(), lengths_S.sum()
    if mode == "token-sum":
        return values_T.sum(), torch.zeros_like(lengths_S).sum()
    sums = sums_of_rows(values_T, lengths_S)
    if mode == "seq-mean-token-mean":
        sums = sums / lengths_S.clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        sums = sums / norm
    elif mode != "seq-mean-token-sum":
        raise ValueError(f"unknown loss_agg_mode {mode!r}")
    return sums.sum(), (lengths_S > 0).sum()


def kl_penalty(log_probs_T: torch.Tensor, ref_log_probs_T: torch.Tensor, kind: str) -> torch.Tensor:
    """Return [T] estimates of KL(policy || reference) from the sampled tokens alone (Schulman,
    "Approximating KL divergence").

    k1 = d; abs = |d|; k2 = d^2/2; k3 = exp(-d) + d - 1, where d = log p - log p_ref. Because k3
    grows exponentially, its d is clamped to +-20 and its result to +-10. The others are not
    clamped, so that a policy far from the reference is still pulled back (as in verl).

    A `+` after the name (k1+, abs+, k3+) keeps the value but uses the gradient of k2. In
    expectation, the gradient of k2 equals that of the divergence; the gradients of k1 and k3 do not
    (arXiv 2506.09477, section 4).
    """
    if kind.endswith("+"):
        with_gradient = kl_penalty(log_probs_T, ref_log_probs_T, "k2")
        value = kl_penalty(log_probs_T, ref_log_probs_T, kind[:-1])
        return with_gradient - with_gradient.detach() + value.detach()
    difference = log_probs_T - ref_log_probs_T
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        clamped = difference.clamp(-20.0, 20.0)
        return ((-clamped).exp() + clamped - 1).clamp(-10.0, 10.0)
    raise ValueError(f"unknown kl_loss_type {kind!r}")


def unbiased_kl(
    log_probs_T: torch.Tensor,
    ref_log_probs_T: torch.Tensor,
    old_log_probs_T: torch.Tensor,
    kind: str,
) -> torch.Tensor:
    """Return [T] k1 or k3 times the ratio of the policy to the sampling policy. In expectation over
    samples from the sampling policy, this equals KL(policy || reference), and its gradient equals
    that of the divergence (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "Unbiased KL Estimate").
    Log-ratios are clamped to +-20; the estimate is not bounded, because that would bias it."""
    difference = log_probs_T - ref_log_probs_T
    ratio = (log_probs_T - old_log_probs_T).clamp(-20.0, 20.0).exp()
    return ratio * (
        difference if kind == "k1" else (-difference).clamp(-20.0, 20.0).exp() + difference - 1
    )


def forward_kl_topk(teacher_log_probs_TK: torch.Tensor, log_probs_TK: torch.Tensor) -> torch.Tensor:
    """Return, for each token [T], the sum of p_T (log p_T - log p_S) over the teacher's k most
    likely tokens: the forward divergence KL(teacher, policy) in states sampled by the policy (GKD,
    arXiv 2306.13649, eq. 2), truncated to the first k tokens.

    Both arguments are log-probs over the whole vocabulary and are not renormalised over the k
    tokens. The probability that the teacher assigns to all other tokens is ignored. If the total
    teacher probability of the k tokens is m < 1, the minimum of the sum is m log m < 0, reached by
    a policy that assigns p_T / m to each of them and 0 to all other tokens. With k = vocabulary
    size, the sum is the exact divergence.
    """
    return (teacher_log_probs_TK.exp() * (teacher_log_probs_TK - log_probs_TK)).sum(-1)
