"""The inputs and outputs of a policy loss, and the decorator that registers losses. Each built-in
loss is defined in a file of the same name in this package. These files import torch only for type
checkers and use only tensor methods, so that `--explain` can import them without loading torch.
User files may import anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridflow.algorithms.estimators.base import rows_of_tokens, sums_of_rows
from hybridflow.config.entries import POLICY_LOSSES, NoOptions, TokenLoss

if TYPE_CHECKING:
    import torch

# loss of each token [T], and metrics: numbers or booleans [T] whose mean over all tokens is
# reported
Loss: TypeAlias = "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"
Function = Callable[["Tokens", Any], "Loss"]


@dataclass(frozen=True)
class Clipping:
    """Options: the clipping range for probability ratios, 1 - `clip_ratio_low` to 1 +
    `clip_ratio_high`."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2

    def surrogates(
        self, advantages: torch.Tensor, ratio: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return -A x ratio for the unclipped and for the clipped ratio; PPO's loss is the maximum
        of the two.
        """
        return -advantages * ratio, -advantages * ratio.clamp(
            1 - self.clip_ratio_low, 1 + self.clip_ratio_high
        )


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of one micro-batch: T tokens in S concatenated sequences.

    Attributes:
        log_probs: [T] log-probs of the sampled tokens under the current weights, with gradient.
        lengths: [S] int64 number of sampled tokens in each sequence; may be 0.
        columns: [T] the columns listed in the loss's `reads`, keyed by name.
    """

    log_probs: torch.Tensor
    lengths: torch.Tensor
    columns: Mapping[str, torch.Tensor]

    def mean_of_sequences(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the mean over each sequence, repeated for each of its tokens, as [T]."""
        means = sums_of_rows(values_T, self.lengths) / self.lengths.clamp(min=1)
        return means[rows_of_tokens(self.lengths)]


def policy_loss(
    name: str,
    *,
    reads: tuple[str, ...] = ("old_log_probs", "advantages"),
    options: type = NoOptions,
    aggregations: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Register a function that maps (tokens, options) to (loss of each token, metrics). `TokenLoss`
    documents the arguments.

    `actor.loss_agg_mode` selects how token losses are aggregated. The entropy bonus and the KL
    penalty are added to every policy loss in the same way.
    """
    return POLICY_LOSSES.entry(
        name, lambda function: TokenLoss(function, reads, options, aggregations)
    )
