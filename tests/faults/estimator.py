"""An advantage that is the score itself: with greedy sampling all samples of a prompt are one, and
none is compared."""

from __future__ import annotations

import torch

from hybridflow.algorithms.estimators.base import Samples, estimator
from hybridflow.config.entries import NoOptions


@estimator("score")
def score(samples: Samples, options: NoOptions) -> tuple[torch.Tensor, None]:
    """The score at each sampled token."""
    return samples.over_tokens(samples.scores), None
