"""Transformations of a reward model's scores before they enter the reward: unchanged, squashed to
0..1, or standardized over the run so far.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hybridflow.config.schema import RewardModelConfig

_SMALLEST = 1e-6  # minimum standard deviation, for scores that are all equal


class ModelScores:
    """Transforms the reward model's scores as configured by `reward_model.squash`. `standard` uses
    the mean and standard deviation of all scores in the run, which are saved in checkpoints.

    The scores of a model trained on pairs have neither a zero point nor a unit: only differences
    between answers are meaningful, and a sigmoid (the probability of beating an answer with score
    0) saturates at 0 or
    1. Standardized over the run, they keep their order and relative distances, on a scale
        comparable to a verifier's score. Because the mean and the deviation change less and less,
        the scores of an improving policy rise. Statistics of the current batch alone would hide
        this.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config
        # squares: summed squared distances from the mean
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0

    def add(self, scores_B: np.ndarray) -> np.ndarray:
        """Return a batch's transformed scores [B] f32, before `reward_model.weight` is applied.
        With `standard`, the scores are first added to the statistics."""
        if self.config.squash == "sigmoid":
            # without overflow
            return np.asarray(0.5 * (1.0 + np.tanh(0.5 * scores_B)), dtype=np.float32)
        if self.config.squash == "none":
            return scores_B.astype(np.float32)
        self._join(scores_B.astype(np.float64))
        spread = max((self.squares / max(self.count, 1.0)) ** 0.5, _SMALLEST)
        bound = np.inf if self.config.clip is None else self.config.clip
        return np.clip((scores_B - self.mean) / spread, -bound, bound).astype(np.float32)

    def state(self) -> dict[str, float]:
        """Return the state to save in a checkpoint."""
        return {"rm_count": self.count, "rm_mean": self.mean, "rm_squares": self.squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state. For older checkpoints, which do not contain it, the statistics start
        from scratch."""
        self.count, self.mean, self.squares = (float(state.get(name, 0.0)) for name in self.state())

    def _join(self, scores_B: np.ndarray) -> None:
        """Merge a batch into the running mean and sum of squares (Chan et al. 1979). Numerically
        stable for any number of batches.
        """
        if not len(scores_B):
            return
        total = self.count + len(scores_B)
        difference = float(scores_B.mean()) - self.mean
        self.squares += (
            float(((scores_B - scores_B.mean()) ** 2).sum())
            + difference**2 * self.count * len(scores_B) / total
        )
        self.mean += difference * len(scores_B) / total
        self.count = total


def share_of_variance(part_B: np.ndarray, whole_B: np.ndarray) -> float:
    """Return cov(part, whole) / var(whole), or 0 if the whole is constant. If parts sum to the
    whole, their shares sum to 1."""
    part, whole = (
        np.asarray(values, np.float64) - np.mean(values, dtype=np.float64)
        for values in (part_B, whole_B)
    )
    variance = float((whole**2).sum())
    return float((part * whole).sum()) / variance if variance > 0 else 0.0


def agreement(model_B: np.ndarray, verifier_B: np.ndarray, group_B: np.ndarray) -> float | None:
    """Return how often the reward model agrees with the verifier: among pairs of answers to the
    same prompt with different verifier scores, the fraction that the model ranks in the same order
    (ties count half). None if there are no such pairs. At 0.5 (chance), the model only adds noise
    to the reward, however accurate it was on its training pairs.
    """
    alike = 0.0
    pairs = 0
    for group in np.unique(group_B):
        model = model_B[group_B == group]
        verifier = verifier_B[group_B == group]
        better = verifier[:, None] > verifier[None]
        order = np.sign(model[:, None] - model[None])[better]
        alike = alike + float((order + 1).sum()) / 2
        pairs = pairs + len(order)
    return alike / pairs if pairs else None
