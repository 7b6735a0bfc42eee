"""GRPO with process supervision: every turn or token of an answer has a separate reward."""

from __future__ import annotations

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator
from hybridflow.algorithms.estimators.grpo import GrpoOptions, grpo_advantages
from hybridflow.errors import ConfigError


@estimator("grpo_process", compares_samples=True, options=GrpoOptions, takes_parts=True)
def grpo_process(samples: Samples, options: GrpoOptions) -> Estimate:
    """Compute, at each token, the sum of the normalised rewards of its part and all later parts
    (DeepSeekMath, arXiv 2402.03300, section 4.1.3).

    The reward of a part, minus its KL penalties, is normalised over all parts of all answers to the
    prompt. The score of the whole answer is not used.

    Raises:
        ConfigError: no sample has turn or token rewards.
    """
    from hybridflow_kernels.scans import discounted_sums

    if samples.part_ends is None or samples.part_rewards is None:
        raise ConfigError(
            "algorithm.adv_estimator=grpo_process requires a reward for each turn or token; return "
            "turn_rewards or token_rewards (lists of numbers) with the score, or set "
            "rollout.agent.loop=environment"
        )
    ends = samples.part_ends
    # part of each token; tokens after a sample's last part have no reward
    part = ends.cumsum(0) - ends.long()
    number = int(ends.sum())
    rewards = samples.part_rewards.new_zeros(number + 1).index_add_(0, part, samples.part_rewards)[
        :number
    ]
    groups = samples.groups.repeat_interleave(samples.lengths)[ends]
    normalised = samples.part_rewards * 0.0
    normalised[ends] = grpo_advantages(rewards, groups, norm_by_std=options.norm_adv_by_std)
    return discounted_sums(normalised, samples.lengths, gamma=1.0, mask_T=samples.mask), None
