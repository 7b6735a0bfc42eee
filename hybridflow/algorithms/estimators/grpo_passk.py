"""Pass@k training: of the samples of a prompt only the best has an advantage."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.estimators._groups import Groups
from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator


@dataclass(frozen=True)
class PassKOptions:
    """Whether the advantage is divided by the standard deviation of the group."""

    norm_adv_by_std: bool = True


@estimator("grpo_passk", compares_samples=True, options=PassKOptions)
def grpo_passk(samples: Samples, options: PassKOptions) -> Estimate:
    """Best score less second best, at the tokens of the best sample (arXiv 2503.19595, section 3); 0 at all others.

    Of equally good samples none is better than the next, so the group has no advantage; nor has a group of one.
    """
    groups, scores = Groups.by(samples.groups), samples.scores.double()
    order = scores.argsort(descending=True, stable=True)
    order = order[groups.of[order].argsort(stable=True)]  # group after group, the best first
    first = groups.count.long().cumsum(0) - groups.count.long()
    second = (first + 1).clamp(max=max(len(order) - 1, 0))
    gap = (scores[order[first]] - scores[order[second]]).where(groups.count > 1, 0.0)
    if options.norm_adv_by_std:
        gap = gap / (groups.std(scores) + 1e-6)
    advantages = scores.new_zeros(len(scores))
    advantages[order[first]] = gap
    return samples.over_tokens(advantages.to(samples.scores.dtype)), None
