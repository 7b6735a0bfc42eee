"""Pass@k training: only the best sample for each prompt has a nonzero advantage."""

from __future__ import annotations

from hybridflow.algorithms.estimators.base import Estimate, Groups, Samples, estimator
from hybridflow.algorithms.estimators.grpo import GrpoOptions


@estimator("grpo_passk", compares_samples=True, options=GrpoOptions)
def grpo_passk(samples: Samples, options: GrpoOptions) -> Estimate:
    """Compute the best minus the second-best score at the tokens of the best sample (arXiv
    2503.19595, section 3), and 0 at all other tokens.

    If the two best scores are equal, or the group has a single sample, all its advantages are 0.
    """
    groups = Groups.by(samples.groups)
    scores = samples.scores.double()
    order = groups.ranked(scores)
    count = groups.count.long()
    first = count.cumsum(0) - count
    second = (first + 1).clamp(max=max(len(order) - 1, 0))
    best = order[first]
    gap = scores[best] - scores[order[second]]
    gap = gap.where(count > 1, 0.0)
    if options.norm_adv_by_std:
        gap = gap / (groups.std(scores) + 1e-6)
    advantages = scores.new_zeros(len(scores))
    advantages[best] = gap
    return samples.over_tokens(advantages.to(samples.scores.dtype)), None
