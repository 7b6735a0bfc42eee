"""Scores of a batch become rewards, advantages and returns; holds what of it outlives a step: KL coefficient, spread of
model scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hybridflow.algorithms.advantages import grpo_advantages
from hybridflow.algorithms.gae import gae, token_rewards, whiten
from hybridflow.algorithms.kl_control import KlControl
from hybridflow.algorithms.losses import kl_penalty
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import RunConfig
from hybridflow.trainer.metrics import spread, spread_over_tokens
from hybridflow.trainer.model_scores import ModelScores, agreement, share_of_variance


class Advantages:
    """By `algorithm`. `metrics` are those of the last step."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.algorithm = config, config.algorithm
        self.control = KlControl(config.algorithm.kl_coef, config.algorithm.kl_target, config.algorithm.kl_horizon)
        self.model_scores = ModelScores(config.reward_model)
        self.metrics: dict[str, float] = {}

    def add(self, batch: DataProto) -> DataProto:
        """Adds rewards [B] (the weighted scores less the KL penalties of the row) and advantages (jagged); with `gae`,
        returns too."""
        self.metrics = {}
        lengths, scores = np.asarray(batch.lengths("response_ids")), self._scores(batch)
        found = self._by_pieces(batch, torch.from_numpy(lengths.astype(np.int64)), torch.from_numpy(scores))
        rewards = scores - found.penalties.numpy()
        if self.algorithm.adv_estimator == "gae":
            advantages = Jagged.from_lengths(whiten(found.advantages).numpy(), lengths)
            return batch.with_columns(
                rewards=rewards, advantages=advantages, returns=Jagged.from_lengths(found.returns.numpy(), lengths)
            )
        values = grpo_advantages(
            torch.from_numpy(rewards), torch.tensor(batch["uid"]), norm_by_std=self.algorithm.norm_adv_by_std
        ).numpy()
        return batch.with_columns(rewards=rewards, advantages=spread_over_tokens(values, lengths))

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"kl_coef": self.control.value, **self.model_scores.state()}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on with it."""
        self.control.value = float(state["kl_coef"])
        self.model_scores.restore(state)

    def _scores(self, batch: DataProto) -> np.ndarray:
        """[B] f32: `reward.weight` times the verifier's score plus, where there is one, `reward_model.weight` times the
        reward model's."""
        scores = np.float32(self.config.reward.weight) * np.asarray(batch["scores"], dtype=np.float32)
        if "rm_scores" not in batch:
            return scores
        given = np.asarray(batch["rm_scores"], dtype=np.float32)
        model = self.model_scores.add(given)
        added = np.float32(self.config.reward_model.weight) * model
        self.metrics |= spread("reward_model/counted", model)
        if (agrees := agreement(given, scores, np.asarray(batch["uid"]))) is not None:
            self.metrics["reward_model/agreement"] = agrees
        self.metrics["reward_model/share"] = share_of_variance(added, scores + added)
        return scores + added

    def _by_pieces(self, batch: DataProto, lengths_B: torch.Tensor, scores_B: torch.Tensor) -> _Found:
        """Row by row; of columns that lie in the object store only a piece is here at a time. Moves the KL coefficient
        on."""
        algorithm, coefficient, with_values = self.algorithm, self.control.value, self.algorithm.adv_estimator == "gae"
        names = (
            *(("old_log_probs", "ref_log_probs") if algorithm.kl_coef else ()),
            *(("values",) if with_values else ()),
        )
        parts, start, kl_total = [], 0, 0.0
        for piece in batch.pieces(names) if names else ():
            rows = slice(start, start + len(piece))
            lengths, start = lengths_B[rows], start + len(piece)
            divergence = self._divergence(piece) if algorithm.kl_coef else torch.zeros(int(lengths.sum()))
            row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            sums = torch.zeros(len(lengths)).index_add_(0, row, divergence)
            kl_total += float((sums / lengths.clamp(min=1)).sum())
            pair = (torch.zeros(0), torch.zeros(0))
            if with_values:
                token = token_rewards(scores_B[rows], coefficient * divergence, lengths)
                pair = gae(
                    token,
                    torch.from_numpy(np.array(piece.jagged("values").values)),
                    lengths,
                    gamma=algorithm.gamma,
                    lam=algorithm.lam,
                )
            parts.append((coefficient * sums, *pair))
        if algorithm.kl_coef:
            kl = kl_total / max(len(lengths_B), 1)
            self.control.update(kl, len(lengths_B))
            self.metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        if not parts:
            return _Found(torch.zeros(len(lengths_B)), torch.zeros(0), torch.zeros(0))
        return _Found(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _divergence(self, piece: DataProto) -> torch.Tensor:
        old, reference = (
            torch.from_numpy(np.array(piece.jagged(name).values)) for name in ("old_log_probs", "ref_log_probs")
        )
        return kl_penalty(old, reference, self.algorithm.kl_penalty)


@dataclass(frozen=True)
class _Found:
    """KL penalty of each row [B]; advantages (not whitened) and returns of each token [T], with a critic."""

    penalties: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
