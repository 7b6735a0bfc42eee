"""ReMax: the score of the greedy answer to the same prompt as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.algorithms.estimators.base import Samples, estimator

if TYPE_CHECKING:
    import torch


@estimator("remax", reads=("greedy_scores",))
def remax(samples: Samples, options: object) -> tuple[torch.Tensor, None]:
    """Rewards to go less `greedy_scores` [B], the score of the most likely answer (arXiv 2310.10505, eq. 5)."""
    from hybridflow_kernels.scans import discounted_sums

    returns = discounted_sums(samples.rewards, samples.lengths, gamma=1.0, mask_T=samples.mask)
    return returns - samples.over_tokens(samples.columns["greedy_scores"]), None
