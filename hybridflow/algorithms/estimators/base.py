"""The inputs and outputs of an advantage estimator, and the decorator that registers estimators.
Each built-in estimator is defined in a file of the same name in this package. These files import
torch only for type checkers and use only tensor methods, so that `--explain` can import them
without loading torch. User files may import anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridflow.config.entries import ESTIMATORS, Estimator, NoOptions

if TYPE_CHECKING:
    import torch

# advantages [T]; with a critic, also the returns [T] that it is trained on
Estimate: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
Function = Callable[["Samples", Any], "Estimate"]


@dataclass(frozen=True)
class Samples:
    """The samples of one step: B samples and their T response tokens, concatenated without padding.

    Attributes:
        scores: [B] f32 reward of each sample, minus its KL penalties.
        rewards: [T] f32 the same reward, distributed over tokens: the negative penalty of each
            token, plus the score at the last sampled token.
        groups: [B] int64 index of each sample's prompt.
        lengths: [B] int64 number of response tokens of each sample.
        mask: [T] bool, True for tokens sampled by the policy. The advantages and returns of all
            other tokens are 0.
        columns: the columns listed in the estimator's `reads`: [T], or [B] if the batch has one
            value per sample.
        parts: additional numbers [B] that the reward function returned for every sample, keyed by
            name.
        part_rewards: [T] for samples with turn or token rewards: the reward of each part at the
            part's last token, minus the KL penalty of each token. None without such rewards.
        part_ends: [T] bool, True for the last token of each part; set together with part_rewards.
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
        """Return each sample's value at its sampled tokens, and 0 at all other tokens, as [T]."""
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
    """Register a function that maps (samples, options) to (advantages, returns or None).
    `Estimator` documents the arguments."""
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
