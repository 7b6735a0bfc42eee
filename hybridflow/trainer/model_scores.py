"""How a reward model's scores enter the reward: as they are, between 0 and 1, or over their spread
in the run so far."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hybridflow.config.schema import RewardModelConfig

_SMALLEST = 1e-6  # standard deviation of scores that are all alike


class ModelScores:
    """Scores of the reward model as `reward_model.squash` has them. With `standard`, mean and
    spread are those of all scores of the run, which a checkpoint keeps.

    Scores of a comparison of pairs have neither zero nor unit: only differences between answers
    mean something, and a sigmoid, which says how likely an answer beats one with score 0, is 0 or 1
    almost everywhere. Over the spread of the run they keep their order and their distances, and
    their size is that of the verifier's score. Mean and spread move ever less: a policy that
    improves is seen to improve, which a spread of the present batch would hide.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config
        # squares: summed squared distances from the mean
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0

    def add(self, scores_B: np.ndarray) -> np.ndarray:
        """[B] f32 what a batch's scores count in the reward, before `reward_model.weight`; with
        `standard` they join the spread first."""
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
        """What a checkpoint keeps."""
        return {"rm_count": self.count, "rm_mean": self.mean, "rm_squares": self.squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on with it; a checkpoint of before these were kept starts them anew."""
        self.count, self.mean, self.squares = (float(state.get(name, 0.0)) for name in self.state())

    def _join(self, scores_B: np.ndarray) -> None:
        """Merge a batch into mean and squares (Chan et al. 1979), exact however many there are."""
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
    """cov(part, whole) / var(whole): shares of parts that add up to the whole add up to 1; 0 where
    the whole does not vary."""
    part, whole = (
        np.asarray(values, np.float64) - np.mean(values, dtype=np.float64)
        for values in (part_B, whole_B)
    )
    variance = float((whole**2).sum())
    return float((part * whole).sum()) / variance if variance > 0 else 0.0


def agreement(model_B: np.ndarray, verifier_B: np.ndarray, group_B: np.ndarray) -> float | None:
    """The share of pairs of answers to one prompt, of those that the verifier tells apart, that the
    model puts in the same order (ties: half).

    None without such pairs. Half is chance: the model then adds noise to the reward, whatever it
    says of the pairs it was trained on.
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
