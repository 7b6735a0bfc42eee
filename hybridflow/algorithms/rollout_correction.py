"""Correction of rollouts whose token probabilities differ between engine and trainer: importance
weights, rejection, and the divergence between the two.

There are T sampled tokens in S concatenated sequences. A token's ratio is its probability under the
trainer divided by its probability under the engine. Log-ratios are clamped to +-20 before they are
exponentiated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hybridflow.algorithms.estimators.base import rows_of_tokens, sums_of_rows

_SAFE = 20.0


def importance_weights(
    log_ratio_T: torch.Tensor,
    lengths_S: torch.Tensor,
    level: str,
    upper: float,
    lower: float | None,
) -> torch.Tensor:
    """Return [T] token weights, without gradient.

    Args:
        level: "token" uses each token's own ratio; "sequence" uses the product of all ratios in its
            sequence.
        upper: larger weights are clipped to this value (truncated importance sampling, arXiv
            2503.14286,  eq. 6).
        lower: weights outside `lower` to `upper` are 0 (IcePop, arXiv 2510.18855, eq. 2); None
            applies only `upper`.
    """
    log_ratio = log_ratio_T.detach()
    if level == "sequence":
        log_ratio = sums_of_rows(log_ratio, lengths_S)[rows_of_tokens(lengths_S)]
    weights = log_ratio.clamp(-_SAFE, _SAFE).exp()
    if lower is None:
        return weights.clamp(max=upper)
    return weights.where((weights >= lower) & (weights <= upper), 0.0)


def kept_tokens(
    log_ratio_T: torch.Tensor,
    lengths_S: torch.Tensor,
    bounds: Mapping[str, float | Sequence[float]],
) -> torch.Tensor:
    """Return [T] bool: True for tokens that are within all bounds.

    Args:
        bounds: bounds keyed by statistic, whose name has the form LEVEL_KIND. Kinds are estimates
            of the divergence from the engine: k1 = -log ratio, k2 = (log ratio)^2 / 2, and
            k3 = ratio - 1 - log ratio. Levels are the single token, or the sum, mean (for k1, the
            geometric mean of the ratios), max or min over a sequence, which is then rejected as a
            whole. The bound for k1 is a pair of limits on exp(k1), the engine / trainer ratio; the
            other kinds have a single upper bound.
    """
    log_ratio = log_ratio_T.detach().clamp(-_SAFE, _SAFE)
    kinds = {"k1": -log_ratio, "k2": 0.5 * log_ratio**2, "k3": log_ratio.exp() - 1.0 - log_ratio}
    row = rows_of_tokens(lengths_S)
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for name, bound in bounds.items():
        level, _, kind = name.rpartition("_")
        values = (
            kinds[kind] if level == "token" else _of_sequences(kinds[kind], lengths_S, level)[row]
        )
        if isinstance(bound, Sequence):
            kept &= (values >= math.log(bound[0])) & (values <= math.log(bound[1]))
        else:
            kept &= values <= bound
    return kept


def on_policy_tokens(
    log_probs_T: torch.Tensor,
    engine_T: torch.Tensor,
    advantages_T: torch.Tensor,
    lengths_S: torch.Tensor,
    most: float,
) -> torch.Tensor:
    """Return [T] bool: False for tokens with a negative advantage in a sequence whose mean of (log
    engine - log policy), under the current weights, exceeds `most` nats (DeepSeek-V3.2, arXiv
    2512.02556, eq. 9)."""
    drift = _of_sequences(engine_T - log_probs_T.detach(), lengths_S, "seq_mean")[
        rows_of_tokens(lengths_S)
    ]
    return (advantages_T >= 0) | (drift <= most)


def _of_sequences(values_T: torch.Tensor, lengths_S: torch.Tensor, level: str) -> torch.Tensor:
    """Return the sum, mean, maximum or minimum over each sequence, [S]; 0 for empty sequences."""
    if level in ("seq_max", "seq_min"):
        way = "amax" if level == "seq_max" else "amin"
        empty = values_T.new_zeros(len(lengths_S))
        return empty.scatter_reduce(0, rows_of_tokens(lengths_S), values_T, way, include_self=False)
    sums = sums_of_rows(values_T, lengths_S)
    return sums if level == "seq_sum" else sums / lengths_S.clamp(min=1)
