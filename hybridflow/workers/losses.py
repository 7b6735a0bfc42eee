"""The loss functions that the roles hand to the backend: packed response tokens in, (sum, count, metrics) out."""

from __future__ import annotations

import torch

from hybridflow.algorithms.losses import Metrics, ResponseTokens, aggregate, kl_penalty
from hybridflow.algorithms.policy_losses.base import Tokens
from hybridflow.algorithms.value_losses import preference_loss, value_token_loss
from hybridflow.config.entries import POLICY_LOSSES, policy_loss_options
from hybridflow.config.schema import ActorConfig, CriticConfig
from hybridflow.data.micro_batches import RESPONSE_MASK


def sft_loss(
    log_probs: torch.Tensor, entropy: torch.Tensor | None, micro: ResponseTokens
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """Cross-entropy of the response tokens."""
    return *aggregate(-log_probs, micro.lengths, "token-mean"), {}


class PolicyLoss:
    """The configured policy loss, minus an entropy bonus, plus a KL penalty to the reference."""

    def __init__(self, config: ActorConfig) -> None:
        self.config, self.options = config, policy_loss_options(config)
        self.function = POLICY_LOSSES.get(config.policy_loss).function
        self.columns = policy_loss_columns(config)
        self.with_entropy = config.entropy_coef != 0

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, micro: ResponseTokens
    ) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Loss sum, count and metrics of a micro-batch; `algorithms.losses.LossFunction`."""
        config = self.config
        loss, reported = self.function(Tokens(log_probs, micro.lengths, micro.columns), self.options)
        metrics = {name: (values.detach().sum(), micro.lengths.sum()) for name, values in reported.items()}
        metrics["actor/pg_loss"] = aggregate(loss.detach(), micro.lengths, config.loss_agg_mode)
        if self.with_entropy and entropy is not None:
            loss = loss - config.entropy_coef * entropy
        if config.kl_loss_coef:
            penalty = kl_penalty(log_probs, micro.columns["ref_log_probs"], config.kl_loss_type)
            metrics["actor/kl_loss"] = aggregate(penalty.detach(), micro.lengths, config.loss_agg_mode)
            loss = loss + config.kl_loss_coef * penalty
        return *aggregate(loss, micro.lengths, config.loss_agg_mode), metrics


def policy_loss_columns(config: ActorConfig) -> tuple[str, ...]:
    """Columns over response tokens that an update of the policy reads."""
    reads = POLICY_LOSSES.get(config.policy_loss).reads
    return tuple(dict.fromkeys((RESPONSE_MASK, *reads, *(("ref_log_probs",) if config.kl_loss_coef else ()))))


class ValueLoss:
    """The critic's clipped regression towards the returns; a `mcore.value_model.ScalarLoss`."""

    columns = (RESPONSE_MASK, "values", "returns")

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(self, values: torch.Tensor, micro: ResponseTokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Values of response tokens [n]."""
        loss, metrics = value_token_loss(
            values, micro.columns["values"], micro.columns["returns"], clip=self.config.cliprange_value
        )
        return *aggregate(loss, micro.lengths, self.config.loss_agg_mode), metrics


class PairLoss:
    """The reward model's comparison of chosen and rejected answers; a `mcore.value_model.ScalarLoss`."""

    def __call__(self, scores: torch.Tensor, micro: ResponseTokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Scores of pairs one after another [2 n]."""
        loss, metrics = preference_loss(scores)
        return loss.sum(), torch.tensor(len(loss), device=loss.device), metrics
