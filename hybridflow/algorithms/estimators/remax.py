"""ReMax: the score of the greedy answer to the same prompt as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.algorithms.estimators.base import Samples, estimator
from hybridflow.algorithms.estimators.gae import discounted_returns

if TYPE_CHECKING:
    import torch


@estimator("remax", reads=("greedy_scores",))
def remax(samples: Samples, options: object) -> tuple[torch.Tensor, None]:
    """Rewards to go less `greedy_scores` [B], the score of the most likely answer (arXiv 2310.10505, eq. 5)."""
    returns = discounted_returns(samples.rewards, samples.lengths, samples.mask, 1.0)
    return returns - samples.over_tokens(samples.columns["greedy_scores"]), None
