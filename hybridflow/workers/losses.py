"""Loss functions that roles pass to the backend. They map packed response tokens to (loss sum,
count, metrics).
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from hybridflow.algorithms.estimators.base import sums_of_rows
from hybridflow.algorithms.losses import (
    OF_TEACHER,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    LossFunction,
    Metrics,
    ResponseTokens,
    aggregate,
    forward_kl_topk,
    kl_penalty,
    unbiased_kl,
)
from hybridflow.algorithms.policy_losses.base import Tokens
from hybridflow.algorithms.rollout_correction import (
    importance_weights,
    kept_tokens,
    on_policy_tokens,
)
from hybridflow.algorithms.value_losses import preference_loss, value_token_loss
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.entries import POLICY_LOSSES, policy_loss_options
from hybridflow.config.schema import ActorConfig, CriticConfig, DistillationConfig
from hybridflow.data.packing import RESPONSE_MASK, Packed, unpack


def sft_loss(
    log_probs: torch.Tensor, entropy: torch.Tensor | None, micro: ResponseTokens
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """Cross-entropy of the response tokens."""
    return *aggregate(-log_probs, micro.lengths, "token-mean"), {}


class PolicyLoss:
    """The configured policy loss, optionally with an entropy bonus, a KL penalty to the reference
    and a distillation loss.
    """

    def __init__(self, config: ActorConfig, old: str | None = "old_log_probs") -> None:
        """`old` names the column that the loss reads as old_log_probs. If it is None, the loss uses
        its own log-probs, detached.
        """
        self.config = config
        self.options = policy_loss_options(config)
        self.old = old
        self.function = POLICY_LOSSES.get(config.policy_loss).function
        self.columns = policy_loss_columns(config, old)
        self.with_entropy = config.entropy_coef != 0 or config.entropy_target is not None

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, micro: ResponseTokens
    ) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Return the loss sum, count and metrics of a micro-batch, as defined by
        `algorithms.losses.LossFunction`."""
        config = self.config
        old = log_probs.detach() if self.old is None else micro.columns.get(self.old)
        columns = micro.columns if old is None else {**micro.columns, "old_log_probs": old}
        tokens = Tokens(log_probs, micro.lengths, columns)
        weights = None
        metrics: Metrics = {}
        if corrects(config):
            tokens, entropy, weights, metrics = self._corrected(tokens, entropy)
        loss, reported = self.function(tokens, self.options)
        metrics |= {
            name: (values.detach().sum(), tokens.lengths.sum()) for name, values in reported.items()
        }
        if weights is not None:
            loss = loss * weights
        if (most := config.rollout_correction.off_policy) is not None:
            engine = tokens.columns["rollout_log_probs"]
            advantages = tokens.columns["advantages"]
            kept = on_policy_tokens(tokens.log_probs, engine, advantages, tokens.lengths, most)
            metrics["rollout_correction/off_policy"] = ((~kept).sum(), tokens.lengths.sum())
            loss = loss * kept
        if not config.distillation.task_rewards:
            loss = torch.zeros_like(loss)
        metrics["actor/pg_loss"] = self._aggregate(loss.detach(), tokens)
        if entropy is not None and self.with_entropy:
            steered = config.entropy_target is not None
            loss = (
                loss
                - (tokens.columns["entropy_coefs"] if steered else config.entropy_coef) * entropy
            )
        if config.kl_loss_coef:
            penalty = self.kl_loss(tokens)
            metrics["actor/kl_loss"] = self._aggregate(penalty.detach(), tokens)
            loss = loss + config.kl_loss_coef * penalty
        if config.distillation.coef:
            distilled = self._distilled(tokens)
            metrics["actor/distillation_loss"] = self._aggregate(distilled.detach(), tokens)
            loss = loss + config.distillation.coef * distilled
        return *self._aggregate(loss, tokens), metrics

    def kl_loss(self, tokens: Tokens) -> torch.Tensor:
        """Estimate the KL divergence from the reference for each token [T]."""
        given = (tokens.log_probs, tokens.columns["ref_log_probs"])
        kind = self.config.kl_loss_type
        if self.config.kl_loss_unbiased:
            return unbiased_kl(*given, tokens.columns["old_log_probs"], kind)
        return kl_penalty(*given, kind)

    def _aggregate(self, values: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return aggregate(
            values, tokens.lengths, self.config.loss_agg_mode, self.config.loss_norm_tokens
        )

    def count(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the count by which the loss sum is divided, for samples with these lengths [s],
        assuming that no token is rejected.
        """
        zeros = torch.zeros(int(lengths.sum()), device=lengths.device)
        return aggregate(zeros, lengths, self.config.loss_agg_mode, self.config.loss_norm_tokens)[1]

    def _distilled(self, tokens: Tokens) -> torch.Tensor:
        """Return the divergence from the teacher for each token [T]."""
        kind = self.config.distillation.loss
        columns = tokens.columns
        if kind == "forward_kl_topk":
            return forward_kl_topk(columns[TEACHER_LOG_PROBS], columns[OF_TEACHER])
        return kl_penalty(tokens.log_probs, columns["teacher_log_probs"], kind)

    def _corrected(
        self, tokens: Tokens, entropy: torch.Tensor | None
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, Metrics]:
        """Apply rollout correction.

        Returns the tokens that were not rejected, their entropies and importance weights, and
        metrics.

        The engine's log-probs are compared with those of the policy before this step's updates. If
        updates use the engine's log-probs as the old ones (actor.old_log_probs=engine), they are
        compared with those of the current policy instead.
        """
        correction = self.config.rollout_correction
        count = tokens.lengths.sum()
        engine = tokens.columns["rollout_log_probs"]
        trainer = tokens.columns["old_log_probs"]
        log_ratio = (
            tokens.log_probs.detach() if self.old == "rollout_log_probs" else trainer
        ) - engine
        metrics: Metrics = {}
        weights = None
        if correction.weight != "none":
            bounds = correction.upper, correction.lower
            weights = importance_weights(log_ratio, tokens.lengths, correction.weight, *bounds)
            metrics["rollout_correction/weight"] = (weights.sum(), count)
            metrics["rollout_correction/weight_squared"] = ((weights**2).sum(), count)
            metrics["rollout_correction/bounded"] = (
                ((weights == 0) | (weights >= correction.upper)).sum(),
                count,
            )
        if not correction.reject:
            return tokens, entropy, weights, metrics
        kept = kept_tokens(log_ratio, tokens.lengths, correction.reject)
        metrics["rollout_correction/rejected"] = ((~kept).sum(), count)
        lengths = sums_of_rows(kept.to(tokens.lengths.dtype), tokens.lengths)
        columns = {name: values[kept] for name, values in tokens.columns.items()}
        entropy, weights = (
            None if values is None else values[kept] for values in (entropy, weights)
        )
        return Tokens(tokens.log_probs[kept], lengths, columns), entropy, weights, metrics


def policy_loss_columns(config: ActorConfig, old: str | None = "old_log_probs") -> tuple[str, ...]:
    """Return the per-token columns that a policy update reads. `old` is the argument of
    `PolicyLoss`.
    """
    reads = [
        old if name == "old_log_probs" else name
        for name in POLICY_LOSSES.get(config.policy_loss).reads
    ]
    engine = ("rollout_log_probs", old) if corrects(config) else ()
    drift = (
        ("rollout_log_probs", "advantages")
        if config.rollout_correction.off_policy is not None
        else ()
    )
    unbiased = (old,) if config.kl_loss_coef and config.kl_loss_unbiased else ()
    steered = ("entropy_coefs",) if config.entropy_target is not None else ()
    reference = ("ref_log_probs",) if config.kl_loss_coef else ()
    wanted = (
        RESPONSE_MASK,
        *reads,
        *engine,
        *drift,
        *unbiased,
        *steered,
        *reference,
        *_teacher_columns(config.distillation),
    )
    return tuple(dict.fromkeys(name for name in wanted if name is not None))


def _teacher_columns(config: DistillationConfig) -> tuple[str, ...]:
    if not config.coef:
        return ()
    return (
        (TEACHER_LOG_PROBS, TEACHER_IDS)
        if config.loss == "forward_kl_topk"
        else ("teacher_log_probs",)
    )


def corrects(config: ActorConfig) -> bool:
    """Return True if rollout correction is enabled, i.e. may weight or reject tokens."""
    return config.rollout_correction.weight != "none" or bool(config.rollout_correction.reject)


class Noted:
    """A loss wrapper that records each micro-batch's log-probs and entropies."""

    with_entropy = True

    def __init__(self, loss: LossFunction) -> None:
        self.loss = loss
        self._seen: list[tuple[Packed, torch.Tensor, torch.Tensor]] = []

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, micro: ResponseTokens
    ) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Record the log-probs and entropies, then return the result of the wrapped loss."""
        assert entropy is not None
        self._seen.append((cast(Packed, micro), log_probs.detach(), entropy.detach()))
        return self.loss(log_probs, entropy, micro)

    def count(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the wrapped loss's count, or the number of tokens if the loss does not define
        one."""
        count = getattr(self.loss, "count", None)
        return count(lengths) if count else lengths.sum()

    def take(self, batch: DataProto) -> DataProto | None:
        """Return old_log_probs and entropys for the rows of `batch`, as computed in the update.
        Values are 0 for tokens that the policy did not sample. Returns None on a rank without the
        output layer.
        """
        if not self._seen:
            return None
        micros, log_probs, entropies = zip(*self._seen, strict=True)
        responses = batch.jagged("response_ids")
        self._seen = []
        sampled = (
            batch.jagged(RESPONSE_MASK).values
            if RESPONSE_MASK in batch
            else np.ones(len(responses.values), bool)
        )
        columns = {}
        for name, values in (("old_log_probs", log_probs), ("entropys", entropies)):
            whole = np.zeros(len(sampled), np.float32)
            whole[sampled] = unpack(
                [one.cpu().numpy() for one in values], micros, len(batch)
            ).values
            columns[name] = Jagged(whole, responses.offsets)
        return DataProto.from_columns(columns)


class ValueLoss:
    """The critic's loss: clipped regression to the returns. Implements
    `mcore.value_model.ScalarLoss`."""

    columns = (RESPONSE_MASK, "values", "returns")

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(
        self, values: torch.Tensor, micro: ResponseTokens
    ) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Return the loss sum, count and metrics for the values [n] of the response tokens."""
        loss, metrics = value_token_loss(
            values,
            micro.columns["values"],
            micro.columns["returns"],
            clip=self.config.cliprange_value,
        )
        return *aggregate(loss, micro.lengths, self.config.loss_agg_mode), metrics


class PairLoss:
    """The reward model's pairwise preference loss. Implements `mcore.value_model.ScalarLoss`."""

    def __call__(
        self, scores: torch.Tensor, micro: ResponseTokens
    ) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Return the loss sum, count and metrics for the scores [2 n] of consecutive (chosen,
        rejected) pairs."""
        loss, metrics = preference_loss(scores)
        return loss.sum(), torch.tensor(len(loss), device=loss.device), metrics
