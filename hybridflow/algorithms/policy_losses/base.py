"""What a policy loss is given and returns, and how one is registered.

A built-in loss is a file of this package that bears its name. It imports torch for type checkers
alone and works with methods of tensors: `--explain` reads its declaration, and must not wait for
torch. A file of a user's may import what it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridflow.algorithms.rewards import rows_of_tokens, sums_of_rows
from hybridflow.config.entries import POLICY_LOSSES, NoOptions, TokenLoss

if TYPE_CHECKING:
    import torch

# loss of each token [T], and metrics: numbers or truths [T] whose mean over all tokens is reported
Loss: TypeAlias = "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"
Function = Callable[["Tokens", Any], "Loss"]


@dataclass(frozen=True)
class Clipping:
    """How far a ratio of probabilities counts: 1 - `clip_ratio_low` to 1 + `clip_ratio_high`."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2

    def surrogates(
        self, advantages: torch.Tensor, ratio: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-A ratio, as it is and with the ratio clipped; PPO's loss is the larger of the two."""
        return -advantages * ratio, -advantages * ratio.clamp(
            1 - self.clip_ratio_low, 1 + self.clip_ratio_high
        )


@dataclass(frozen=True)
class Tokens:
    """The tokens of one micro-batch that the policy sampled: T of them in S sequences, one after
    another.

    Attributes:
        log_probs: [T] of the sampled tokens under the present weights, with gradient.
        lengths: [S] int64 sampled tokens of each sequence; may be 0.
        columns: [T] the columns that the loss declared to read, by name.
    """

    log_probs: torch.Tensor
    lengths: torch.Tensor
    columns: Mapping[str, torch.Tensor]

    def mean_of_sequences(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T] the mean over its sequence, at each token."""
        means = sums_of_rows(values_T, self.lengths) / self.lengths.clamp(min=1)
        return means[rows_of_tokens(self.lengths)]


def policy_loss(
    name: str,
    *,
    reads: tuple[str, ...] = ("old_log_probs", "advantages"),
    options: type = NoOptions,
    aggregations: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Register a function (tokens, options) -> (loss of each token, metrics); see `TokenLoss` for
    the arguments.

    `actor.loss_agg_mode` says how the losses of tokens become one number; entropy bonus and KL
    penalty are added to every policy loss alike.
    """
    return POLICY_LOSSES.entry(
        name, lambda function: TokenLoss(function, reads, options, aggregations)
    )
