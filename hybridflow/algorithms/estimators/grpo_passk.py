"""Pass@k training: only the best sample of a prompt has an advantage."""

from __future__ import annotations

from hybridflow.algorithms.estimators._groups import Groups
from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator
from hybridflow.algorithms.estimators.grpo import GrpoOptions


@estimator("grpo_passk", compares_samples=True, options=GrpoOptions)
def grpo_passk(samples: Samples, options: GrpoOptions) -> Estimate:
    """Compute best minus second-best score, at the tokens of the best sample (arXiv 2503.19595,
    section 3); 0 at all others.

    If the two best scores are equal, or the group has a single sample, the group has no advantage.
    """
    groups = Groups.by(samples.groups)
    scores = samples.scores.double()
    order = groups.ranked(scores)
    first = groups.count.long().cumsum(0) - groups.count.long()
    second = (first + 1).clamp(max=max(len(order) - 1, 0))
    gap = (scores[order[first]] - scores[order[second]]).where(groups.count > 1, 0.0)
    if options.norm_adv_by_std:
        gap = gap / (groups.std(scores) + 1e-6)
    advantages = scores.new_zeros(len(scores))
    advantages[order[first]] = gap
    return samples.over_tokens(advantages.to(samples.scores.dtype)), None
