"""Optimal token baseline: a baseline for each position, to which answers contribute in proportion
to their accumulated gradient."""

from __future__ import annotations

from hybridflow.algorithms.estimators.base import (
    Estimate,
    Groups,
    Samples,
    estimator,
    rows_of_tokens,
)


@estimator(
    "optimal_token_baseline", reads=("old_log_probs", "sum_pi_squared"), compares_samples=True
)
def optimal_token_baseline(samples: Samples, options: object) -> Estimate:
    """Compute G_t minus sum(W_t G_t) / sum(W_t) over the answers to the prompt that have a t-th
    sampled token.

    This is the optimal token baseline of arXiv 2602.07078. G_t is the reward to go. W_t is the sum,
    over the tokens up to t, of 1 - 2 p + (sum of p^2 over the vocabulary), the squared norm of the
    gradient of the token's log-probability with respect to the logits. As in verl's multi-turn
    variant, positions count only sampled tokens. A position that only one answer reaches has no
    baseline.
    """
    from hybridflow_kernels.scans import discounted_sums

    mask = samples.mask
    groups = Groups.by(samples.groups)
    returns = discounted_sums(samples.rewards, samples.lengths, gamma=1.0, mask_T=mask)
    # sample index of each sampled token, and its position among that sample's sampled tokens
    row = rows_of_tokens(samples.lengths)[mask]
    number = row.bincount(minlength=len(samples.lengths))
    first = number.cumsum(0) - number
    place = row.new_ones(len(row)).cumsum(0) - 1 - first[row]
    longest = int(place.max()) + 1
    log_probs = samples.columns["old_log_probs"].double()[mask]
    sum_squared = samples.columns["sum_pi_squared"].double()[mask]
    gradient = 1 - 2 * log_probs.exp() + sum_squared
    gathered = gradient.new_zeros(len(samples.scores), longest)
    gathered[row, place] = gradient.clamp(min=0.0)
    weight = gathered.cumsum(1)[row, place]

    at = groups.of[row] * longest + place  # index of each token's (prompt, position)
    has_others = at.bincount() > 1
    zeros = weight.new_zeros(len(has_others))
    own = returns[mask].double()
    # relative to one of the position's returns, so that equal returns leave exactly 0
    relative = own - zeros.scatter(0, at, own)[at]
    weighted = zeros.index_add(0, at, weight * relative)
    total = zeros.index_add(0, at, weight) + 1e-8
    mean = weighted / total
    compared = (relative - mean[at]).where(has_others[at], own)
    advantages = returns.clone()
    advantages[mask] = compared.to(returns.dtype)
    return advantages.where(mask, 0.0), None
