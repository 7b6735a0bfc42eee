"""The loss functions that the roles hand to the backend: packed response tokens in, (sum, count, metrics) out."""

from __future__ import annotations

import torch

from hybridflow.algorithms.losses import Metrics, ResponseTokens, aggregate, kl_penalty, ppo_token_loss
from hybridflow.algorithms.value_losses import preference_loss, value_token_loss
from hybridflow.config.schema import ActorConfig, CriticConfig


def sft_loss(
    log_probs: torch.Tensor, entropy: torch.Tensor | None, micro: ResponseTokens
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """Cross-entropy of the response tokens."""
    total, count = aggregate(-log_probs, micro.lengths, "token-mean")
    return total, count, {}


class PolicyLoss:
    """PPO's clipped surrogate, minus an entropy bonus, plus a KL penalty to the reference, by the actor's
    configuration."""

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.with_entropy = config.entropy_coef != 0
        self.with_reference = config.kl_loss_coef != 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that the loss reads."""
        return (
            ("old_log_probs", "advantages", "ref_log_probs") if self.with_reference else ("old_log_probs", "advantages")
        )

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, micro: ResponseTokens
    ) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """See `algorithms.losses.LossFunction`."""
        config, columns = self.config, micro.columns
        loss, metrics = ppo_token_loss(
            log_probs,
            columns["old_log_probs"],
            columns["advantages"],
            clip_low=config.clip_ratio_low,
            clip_high=config.clip_ratio_high,
            clip_c=config.clip_ratio_c,
        )
        metrics["actor/pg_loss"] = self._metric(loss, micro)
        if self.with_entropy and entropy is not None:
            loss = loss - config.entropy_coef * entropy
        if self.with_reference:
            penalty = kl_penalty(log_probs, columns["ref_log_probs"], config.kl_loss_type)
            metrics["actor/kl_loss"] = self._metric(penalty, micro)
            loss = loss + config.kl_loss_coef * penalty
        total, count = aggregate(loss, micro.lengths, config.loss_agg_mode)
        return total, count, metrics

    def _metric(self, values: torch.Tensor, micro: ResponseTokens) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = aggregate(values.detach(), micro.lengths, self.config.loss_agg_mode)
        return total, count


class ValueLoss:
    """The critic's clipped regression towards the returns, by its configuration; see `mcore.value_model.ScalarLoss`."""

    columns = ("values", "returns")

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(self, values: torch.Tensor, micro: ResponseTokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Values of response tokens [n]."""
        loss, metrics = value_token_loss(
            values, micro.columns["values"], micro.columns["returns"], clip=self.config.cliprange_value
        )
        total, count = aggregate(loss, micro.lengths, self.config.loss_agg_mode)
        return total, count, metrics


class PairLoss:
    """The reward model's comparison of chosen and rejected answers; see `mcore.value_model.ScalarLoss`."""

    def __call__(self, scores: torch.Tensor, micro: ResponseTokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Scores of pairs one after another [2 n]."""
        loss, metrics = preference_loss(scores)
        return loss.sum(), torch.tensor(len(loss), device=loss.device), metrics
