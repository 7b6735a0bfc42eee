"""Aggregation of token losses and KL penalties for packed response tokens, and checks that losses
and gradients are finite.

Losses return (sum, count). The sums are scaled in a single place, by the global count over
data-parallel ranks and micro-batches, so the gradient does not depend on how the batch was split.
If that count is 0, the sum is not scaled. T is the number of response tokens of a micro-batch, S
its number of sequences.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from hybridflow.algorithms.estimators.base import sums_of_rows
from hybridflow.errors import NonFiniteError

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]

# columns [T, k] with the teacher's most likely tokens. The last column is added by the backend if
# the micro-batch has the ids: the policy's log-probs of these tokens, with gradient
TEACHER_LOG_PROBS = "teacher_top_log_probs"
TEACHER_IDS = "teacher_top_ids"
OF_TEACHER = "policy_of_teacher_top"
_PLACES = ("the loss", "a gradient", "the reduced gradients")  # each can cause the next


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


class NonfiniteWatch:
    """Checks one mini-batch on this rank for NaN and infinity.

    All ranks agree on the result, which names the rank and micro-batch. For each micro-batch, the
    loss and some gradients in the backward pass are checked. A value that becomes non-finite
    anywhere else also shows up in those gradients. The flags stay on the device until the end of
    the mini-batch, so a check costs one read and one small all-gather.
    """

    def __init__(self, num_micro_batches: int, device: torch.device) -> None:
        # one row per place; the last place has no micro-batches
        self.flags = torch.zeros((2, num_micro_batches), dtype=torch.bool, device=device)

    def loss(self, micro_batch: int, total: torch.Tensor) -> None:
        """Check `total`, the loss of this micro-batch."""
        self._note(0, micro_batch, total)

    def gradient_of(self, tensor: torch.Tensor | None, micro_batch: int) -> None:
        """Check the gradient of `tensor` in the backward pass of this micro-batch."""
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda grad: self._note(1, micro_batch, grad))

    def _note(self, place: int, micro_batch: int, values: torch.Tensor) -> None:
        self.flags[place, micro_batch] |= not_finite(values)

    def report_of(self, gradients: Iterable[torch.Tensor]) -> str:
        """Return a description of the problem with this mini-batch, identical on all ranks; empty
        if there is none. Collective over the world.

        Args:
            gradients: this rank's reduced gradients.
        """
        reduced = torch.stack([not_finite(data) for data in gradients]).any()
        # the first micro-batch at each place; -1: none
        found = [torch.where(row.any(), row.int().argmax(), -1) for row in self.flags]
        mine = torch.stack([*found, torch.where(reduced, 0, -1)]).to(torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return describe_nonfinite(torch.stack(everyone).tolist())


def not_finite(values: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor that is True if any value is NaN or infinite, i.e. if the minimum or
    maximum is. This takes one pass over the values, whereas `isfinite` takes four and allocates a
    tensor of the same size in each.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return ~torch.stack(torch.aminmax(values)).isfinite().all()


def describe_nonfinite(found: Sequence[Sequence[int]]) -> str:
    """Describe where the first non-finite values occurred. `found` [world][3] contains, for each
    rank and each kind of check, the first micro-batch with a non-finite value, or -1.
    """
    for place, name in enumerate(_PLACES):
        ranks = [(rank, row[place]) for rank, row in enumerate(found) if row[place] >= 0]
        if not ranks:
            continue
        if place == len(_PLACES) - 1:
            return (
                f"{name} on rank {ranks[0][0]} are not finite, although the gradients of every "
                "micro-batch are: their sum overflowed"
            )
        shown = ", ".join(f"rank {rank} micro-batch {micro}" for rank, micro in ranks[:4])
        more = f" and {len(ranks) - 4} more ranks" if len(ranks) > 4 else ""
        return f"{name} is not finite: {shown}{more} (counted from 0)"
    return ""


def not_applied(
    problem: str,
    on_nonfinite: str,
    metrics: Mapping[str, tuple[float, float]],
    learning_rate: float,
) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return the metrics of an update that was skipped because of this problem.

    Raises:
        NonFiniteError: `on_nonfinite` is stop.
    """
    if on_nonfinite == "stop":
        raise NonFiniteError(
            f"{problem}. The update was not applied. Lower the learning rate (actor.optim.lr, "
            "critic.optim.lr, sft.optim.lr) and rerun the same command to resume from the last "
            "checkpoint, or skip such updates with actor.on_nonfinite=skip"
        )
    logging.getLogger(__name__).warning("update skipped (actor.on_nonfinite=skip): %s", problem)
    finite = {name: pair for name, pair in metrics.items() if math.isfinite(pair[0])}
    return finite, {"grad_norm": math.nan, "lr": learning_rate, "applied": 0.0}
