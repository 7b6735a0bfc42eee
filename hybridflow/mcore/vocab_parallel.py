"""Log-probabilities and entropy from logits that are split over tensor-parallel ranks; full logits never exist on one rank.

Shapes: t tokens, v vocabulary rows of this rank. All arithmetic in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _SumOverGroup(torch.autograd.Function):
    """All-reduce (sum) whose backward is the identity: every rank computes the same loss, so each keeps its own share of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        total = tensor.clone().contiguous()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def log_probs_and_entropy(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, *, vocab_size: int, temperature: float, group: Any, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(target) and, when asked for, the entropy of softmax(logits / temperature).

    Args:
        logits_TV: [t, v], this rank's rows of the vocabulary (rank r holds [r v, (r + 1) v)); may hold padding rows at the end.
        targets_T: [t] global token ids.
        vocab_size: rows at or behind it are padding and take no probability.
        temperature: divides the logits, as the sampler did.
        group: tensor-parallel group.

    Returns:
        [t] log-probs with gradient, [t] entropies (natural log, with gradient) or None. Equal on all ranks of the group.
    """
    rank, rows = dist.get_rank(group), logits_TV.shape[-1]
    first = rank * rows
    logits = logits_TV.float() / temperature
    padding = first + rows - vocab_size
    if padding > 0:
        logits = logits[:, : rows - padding] if padding < rows else logits[:, :0]
    # one small all-reduce for the maximum, one for everything that sums: latency is what tensor parallelism costs over gloo
    top = logits.detach().amax(-1) if logits.shape[-1] else logits.new_full((logits.shape[0],), -torch.inf)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - top[:, None]
    exponentials = shifted.exp()
    local = targets_T - first
    mine = (local >= 0) & (local < logits.shape[-1])
    if logits.shape[-1]:
        picked = torch.where(mine, shifted.gather(-1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0], 0.0)
    else:
        picked = shifted.sum(-1)
    sums = [exponentials.sum(-1), picked]
    if with_entropy:
        sums.append((exponentials * shifted).sum(-1))
    totals = _SumOverGroup.apply(torch.stack(sums), group)
    log_z = totals[0].log()
    # H = log Z - E[x], x the shifted logits
    entropy = log_z - totals[2] / totals[0] if with_entropy else None
    return totals[1] - log_z, entropy
