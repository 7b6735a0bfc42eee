"""What an advantage estimator is given and returns, and how one is registered.

A built-in estimator is a file of this package that bears its name. It imports torch for type
checkers alone and works with methods of tensors: `--explain` reads its declaration, and must not
wait for torch. A file of a user's may import what it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridflow.config.entries import ESTIMATORS, Estimator, NoOptions

if TYPE_CHECKING:
    import torch

# advantages [T]; with a critic, the returns [T] that it learns from as well
Estimate: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
Function = Callable[["Samples", Any], "Estimate"]


@dataclass(frozen=True)
class Samples:
    """The samples of one step: B samples, and their T response tokens one after another without
    padding.

    Attributes:
        scores: [B] f32 reward of each sample, its KL penalties taken off.
        rewards: [T] f32 the same by token: minus the penalty of the token, and the score at the
            last sampled token.
        groups: [B] int64 the prompt of each sample.
        lengths: [B] int64 response tokens of each sample.
        mask: [T] bool, whether the policy sampled the token. Advantages and returns of other tokens
            are 0.
        columns: [T], or [B] where the batch has one value a sample: the columns that the estimator
            declared to read.
        parts: [B] numbers that the reward returned for every sample beside the score, by name.
        part_rewards: [T] where samples are rewarded turn by turn or token by token: the reward of
            each part at its last token, less the KL penalty of each token; None: they are not.
        part_ends: [T] bool, the last token of each part; with part_rewards.
    """

    scores: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    part_rewards: torch.Tensor | None = None
    part_ends: torch.Tensor | None = None

    def over_tokens(self, values_B: torch.Tensor) -> torch.Tensor:
        """[T] the value of its sample at each sampled token, 0 at all others."""
        return values_B.repeat_interleave(self.lengths).where(self.mask, 0.0)


def estimator(
    name: str,
    *,
    reads: tuple[str, ...] = (),
    needs_critic: bool = False,
    compares_samples: bool = False,
    options: type = NoOptions,
    aggregations: tuple[str, ...] = (),
    takes_parts: bool = False,
    preferences: bool = False,
) -> Callable[[Function], Function]:
    """Register a function (samples, options) -> (advantages, returns or None); see `Estimator` for
    the arguments."""
    declared = (
        reads,
        needs_critic,
        compares_samples,
        options,
        aggregations,
        takes_parts,
        preferences,
    )
    return ESTIMATORS.entry(name, lambda function: Estimator(function, *declared))
