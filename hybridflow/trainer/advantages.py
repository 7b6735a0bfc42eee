"""Computation of a batch's rewards, advantages and returns from its scores. Also keeps the state
that persists across steps: the KL coefficient, the entropy coefficient, and running statistics of
model scores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hybridflow.algorithms.entropy_control import EntropyControl, most_uncertain
from hybridflow.algorithms.estimators.base import (
    Samples,
    overlong_penalties,
    sums_of_rows,
    token_rewards,
)
from hybridflow.algorithms.kl_control import KlControl
from hybridflow.algorithms.losses import kl_penalty
from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.entries import ESTIMATORS, FLOWS, estimator_options
from hybridflow.config.role_table import CRITICS, ROLES
from hybridflow.config.schema import RunConfig
from hybridflow.data.packing import RESPONSE_MASK, sampled_tokens
from hybridflow.dispatch import DataflowStep
from hybridflow.errors import DataError, FlowError
from hybridflow.rewards.verifiers.base import PART_REWARDS, finite_number
from hybridflow.rollout.requests import values
from hybridflow.trainer.metrics import spread
from hybridflow.trainer.model_scores import ModelScores, agreement, share_of_variance

_COEFFICIENT = "actor/reward_kl_penalty_coeff"


def advantages_step(config: RunConfig) -> DataflowStep:
    """Return the columns that the advantage step reads and writes under this configuration."""
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    penalty = ("old_log_probs", "ref_log_probs") if config.algorithm.kl_coef else ()
    model = ("rm_scores",) if derived.has_reward_model(config) else ()
    returns = ("returns",) if estimator.needs_critic else ()
    steered = config.actor.entropy_target is not None
    forks = config.algorithm.top_entropy_share < 1
    entropy = ("entropys",) if steered or forks else ()
    coefficients = ("entropy_coefs",) if steered else ()
    always = ("response_ids", RESPONSE_MASK, "scores", "uid")
    reads = dict.fromkeys((*always, *model, *penalty, *entropy, *estimator.reads))
    return DataflowStep(
        "advantages", tuple(reads), ("rewards", "advantages", *returns, *coefficients)
    )


class Advantages:
    """Computes rewards and advantages as configured by `algorithm`. `metrics` contains the last
    step's metrics."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.algorithm = config.algorithm
        self.estimator = ESTIMATORS.get(self.algorithm.adv_estimator)
        self.options = estimator_options(self.algorithm)
        self.control = KlControl(
            config.algorithm.kl_coef, config.algorithm.kl_target, config.algorithm.kl_horizon
        )
        self.model_scores = ModelScores(config.reward_model)
        actor = config.actor
        self.entropy: EntropyControl | None = None
        if actor.entropy_target is not None:
            self.entropy = EntropyControl(
                actor.entropy_coef, actor.entropy_target, actor.entropy_coef_step
            )
        self.metrics: dict[str, float] = {}

    def add(self, batch: DataProto, of: str = "scores") -> DataProto:
        """Return the batch with added columns: rewards [B] (weighted scores minus the row's KL
        penalties) and advantages (jagged); with a critic, also returns; with an entropy target,
        also entropy_coefs (the entropy coefficient at each token).

        Args:
            of: the column [B] from which advantages are computed. If it is not scores, other
                columns are added (see `_add_of`).
        """
        if of != "scores":
            return self._add_of(batch, of)
        self.metrics = {}
        lengths = torch.tensor(batch.lengths("response_ids"))
        scores = torch.from_numpy(self._scores(batch))
        divergence = self._divergence(batch)
        penalties = self.control.value * divergence
        if self.algorithm.kl_coef:
            self._control_kl(divergence, batch)
        columns = self._estimated(batch, scores, penalties)
        if self.entropy is not None:
            coefficients = torch.full((len(penalties),), self._entropy_coefficient(batch))
            columns["entropy_coefs"] = (coefficients, columns["advantages"][1])
        return batch.with_torch(rewards=scores - sums_of_rows(penalties, lengths), **columns)

    def _add_of(self, batch: DataProto, of: str) -> DataProto:
        """Return the batch with advantages (and, if there is a critic, returns) computed from a
        column of costs.

        The KL penalties that are subtracted from rewards are added to costs (Safe RLHF, arXiv
        2310.12773, appendix B.3).

        Raises:
            FlowError: the column is not [B], or the estimator needs more than one number per
                sample.
        """
        name = self.algorithm.adv_estimator
        entry = self.estimator
        reads_scores = "greedy_scores" in entry.reads or hasattr(self.options, "rewards")
        if reads_scores or entry.preferences or entry.takes_parts:
            raise FlowError(
                f"advantages(batch, of={of!r}) is not supported with "
                f"algorithm.adv_estimator={name}, because that estimator needs more than one "
                "number per sample; set it to gae or grpo"
            )
        column = np.asarray(batch[of])
        if column.shape != (len(batch),) or column.dtype.kind not in "biuf":
            raise FlowError(
                f"advantages(batch, of={of!r}): the column {of} must contain one number per sample"
            )
        costs = torch.from_numpy(column.astype(np.float32))
        # the coefficient used for this step's rewards; the control may have updated it since
        coefficient = self.metrics.get(_COEFFICIENT, self.control.value)
        penalties = -coefficient * self._divergence(batch)
        prefix = ROLES[CRITICS[of]].prefix
        return batch.with_torch(**self._estimated(batch, costs, penalties, prefix))

    def _estimated(
        self,
        batch: DataProto,
        scores: torch.Tensor,
        penalties: torch.Tensor,
        prefix: str = "",
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Run the estimator on per-sample scores [B] and per-token penalties [T]. Returns its
        jagged columns, whose names start with `prefix`."""
        lengths = torch.tensor(batch.lengths("response_ids"))
        counts = samples_that_count(batch, compares=self.estimator.compares_samples)
        tokens = counts.repeat_interleave(lengths)
        # excluded rows have zero advantage
        advantages = torch.zeros(len(tokens))
        returns = torch.zeros(len(tokens)) if self.estimator.needs_critic else None
        if counts.any():
            counted = batch if counts.all() else batch.rows(counts.numpy())
            samples = self._samples(counted, scores[counts], penalties[tokens], prefix)
            found, found_returns = self.estimator.function(samples, self.options)
            advantages[tokens] = found.float()
            if self.algorithm.top_entropy_share < 1:
                advantages *= self._forks(batch)
            if returns is not None:
                returns[tokens] = found_returns.float()
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        columns = {f"{prefix}advantages": (advantages, offsets)}
        if returns is not None:
            columns[f"{prefix}returns"] = (returns, offsets)
        return columns

    def state(self) -> dict[str, float]:
        """Return the state to save in a checkpoint."""
        steered = {} if self.entropy is None else {"entropy_coef": self.entropy.value}
        return {"kl_coef": self.control.value, **steered, **self.model_scores.state()}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state from a checkpoint."""
        self.control.value = float(state["kl_coef"])
        if self.entropy is not None:  # absent if the earlier run had no target
            self.entropy.value = float(state.get("entropy_coef", self.entropy.value))
        self.model_scores.restore(state)

    def _scores(self, batch: DataProto) -> np.ndarray:
        """Return the weighted scores [B] f32: `reward.weight` times the verifier's score, plus
        `reward_model.weight` times the reward model's score if there is one, minus the penalty for
        overlong answers."""
        reward = self.config.reward
        scores = np.float32(reward.weight) * np.asarray(batch["scores"], dtype=np.float32)
        if reward.overlong_tokens:
            limit = self.config.data.max_response_length
            lengths = torch.tensor(batch.lengths("response_ids"))
            punished = overlong_penalties(
                lengths, limit, reward.overlong_tokens, reward.overlong_penalty
            )
            self.metrics["reward/overlong"] = float((punished > 0).float().mean())
            scores = scores - punished.numpy()
        if "rm_scores" not in batch:
            return scores
        given = np.asarray(batch["rm_scores"], dtype=np.float32)
        model = self.model_scores.add(given)
        added = np.float32(self.config.reward_model.weight) * model
        self.metrics |= spread("reward_model/counted", model)
        agrees = agreement(given, scores, np.asarray(batch["uid"]))
        if agrees is not None:
            self.metrics["reward_model/agreement"] = agrees
        self.metrics["reward_model/share"] = share_of_variance(added, scores + added)
        return scores + added

    def _samples(
        self, batch: DataProto, scores: torch.Tensor, penalties: torch.Tensor, prefix: str
    ) -> Samples:
        """Build the estimator's input from per-sample scores [B] and per-token penalties [T].
        `prefix` is the name prefix of the critic's columns.
        """
        own = {"values": f"{prefix}values"}
        lengths = torch.tensor(batch.lengths("response_ids"))
        mask = batch.torch(RESPONSE_MASK)[0]
        columns = {name: _values(batch, own.get(name, name)) for name in self.estimator.reads}
        given, ends = _part_rewards(batch) if self.estimator.takes_parts else (None, None)
        part_rewards = None
        if given is not None:
            part_rewards = self.config.reward.weight * given - penalties
        return Samples(
            scores=scores - sums_of_rows(penalties, lengths),
            rewards=token_rewards(scores, penalties, lengths, mask),
            groups=torch.tensor(batch["uid"]),
            lengths=lengths,
            mask=mask,
            columns=columns,
            parts=_reward_parts(batch),
            part_rewards=part_rewards,
            part_ends=ends,
        )

    def _forks(self, batch: DataProto) -> torch.Tensor:
        """Return a mask [T] bool that is True for the highest-entropy tokens. The advantages of all
        other tokens are set to 0 (`algorithm.top_entropy_share`).
        """
        entropies = batch.torch("entropys")[0]
        mask = batch.torch(RESPONSE_MASK)[0]
        kept = most_uncertain(entropies, mask, self.algorithm.top_entropy_share)
        share = kept.sum() / mask.sum().clamp(min=1)
        self.metrics["actor/top_entropy_share"] = float(share)
        return kept

    def _entropy_coefficient(self, batch: DataProto) -> float:
        """Return this step's entropy bonus coefficient, and update it for the next step."""
        assert self.entropy is not None
        mask = batch.torch(RESPONSE_MASK)[0]
        if not mask.any():
            return 0.0
        entropies = batch.torch("entropys")[0][mask]
        coefficient = self.entropy.update(float(entropies.double().mean()))
        self.metrics["actor/entropy_coef"] = coefficient
        return coefficient

    def _divergence(self, batch: DataProto) -> torch.Tensor:
        """Return the estimated divergence from the reference at each token [T]; zeros if there is
        no KL penalty.
        """
        mask_T = batch.torch(RESPONSE_MASK)[0]
        if not self.algorithm.kl_coef:
            return torch.zeros(len(mask_T))
        old = batch.torch("old_log_probs")[0]
        reference = batch.torch("ref_log_probs")[0]
        penalty = kl_penalty(old, reference, self.algorithm.kl_penalty)
        return penalty.where(mask_T, 0.0)

    def _control_kl(self, divergence: torch.Tensor, batch: DataProto) -> None:
        """Record the step's KL penalty, and update its coefficient for the next step."""
        coefficient = self.control.value
        lengths_B = torch.tensor(batch.lengths("response_ids"))
        mask_T = batch.torch(RESPONSE_MASK)[0]
        sampled = sums_of_rows(mask_T.float(), lengths_B)
        means = sums_of_rows(divergence, lengths_B) / sampled.clamp(min=1)
        count = len(lengths_B)
        kl = float(means.sum()) / max(count, 1)
        self.control.update(kl, count)
        self.metrics |= {"actor/reward_kl_penalty": kl, _COEFFICIENT: coefficient}


def samples_that_count(batch: DataProto, *, compares: bool) -> torch.Tensor:
    """Return a mask [B] bool that is True for samples with at least one unmasked token. If samples
    of the same prompt are compared, a sample that is the only one left in its group is also masked
    out.
    """
    counts = torch.from_numpy(sampled_tokens(batch) > 0)
    if counts.all() or not compares:
        return counts
    _, group = torch.tensor(batch["uid"]).unique(return_inverse=True)
    size = group.bincount()
    left = group.bincount(weights=counts.double())
    return counts & ((left > 1) | (size == 1))[group]


def _values(batch: DataProto, name: str) -> torch.Tensor:
    """Return the values [T] of a jagged column, or [B] of a dense one."""
    found = batch.torch(name)
    return found[0] if isinstance(found, tuple) else found


class RequiredParts:
    """The numbers that the reward of a run must return in addition to the score."""

    def __init__(self, config: RunConfig) -> None:
        algorithm = config.algorithm
        flow = derived.flow_name(config)
        self._needed = dict.fromkeys(FLOWS.get(flow).rewards, f"algorithm.flow={flow}")
        key = "algorithm.adv_estimator_options.rewards"
        combined = getattr(estimator_options(algorithm), "rewards", ())
        self._needed |= dict.fromkeys(combined, key)
        self._takes_parts = ESTIMATORS.get(algorithm.adv_estimator).takes_parts

    def lost(self, batch: DataProto) -> list[str | None]:
        """Return, for each row [B], why it counts as failed despite having a score, else None: a
        number is missing, or there are more turn or token rewards than turns or tokens."""
        texts: list[str | None] = [None] * len(batch)
        extras = values(batch, "reward_extra", {})
        most = _part_counts(batch) if self._takes_parts else {}
        for row, (extra, is_failed) in enumerate(zip(extras, _failed(batch), strict=True)):
            if is_failed:
                continue
            missing = [name for name in self._needed if finite_number(extra.get(name)) is None]
            if missing:
                name = missing[0]
                texts[row] = (
                    f"the reward returned {name}={extra.get(name)!r:.60}, but "
                    f"{self._needed[name]} requires a finite number of this name"
                )
            for name, counts in most.items():
                returned = len(extra.get(name) or ())
                if returned > counts[row]:
                    texts[row] = _too_many(name, returned, counts[row])
        return texts


def _too_many(name: str, returned: int, sampled: int) -> str:
    unit = name.partition("_")[0]
    return (
        f"the reward returned {returned} {name}, but the policy sampled {sampled} {unit}s in this "
        "answer"
    )


def _failed(batch: DataProto) -> list[bool]:
    return [text is not None for text in values(batch, "reward_failure", None)]


def _reward_parts(batch: DataProto) -> dict[str, torch.Tensor]:
    """Return the numbers that the reward function returned for every sample in addition to the
    score, as {name: [B] f32}; 0 for samples whose scoring failed.
    """
    if "reward_extra" not in batch:
        return {}
    extras = batch["reward_extra"].tolist()
    rows = [None if lost else row for row, lost in zip(extras, _failed(batch), strict=True)]
    returned = [set(row) for row in rows if row is not None]
    names = set.intersection(*returned) if returned else set()
    found = {}
    for name in sorted(names):
        numbers = [0.0 if row is None else finite_number(row[name]) for row in rows]
        if None not in numbers:
            found[name] = torch.tensor(numbers)
    return found


def _part_ends(batch: DataProto, name: str) -> np.ndarray:
    """Return a mask [T] bool that is True at the last token of each turn (a run of sampled tokens),
    or at each sampled token."""
    column = batch.jagged(RESPONSE_MASK)
    mask = column.values
    offsets = column.offsets
    ends = mask.copy()
    if name == "turn_rewards":
        goes_on = np.append(mask[1:], False)
        row_ends = offsets[1:]
        goes_on[row_ends[row_ends > 0] - 1] = False
        ends &= ~goes_on
    return ends


def _part_counts(batch: DataProto) -> dict[str, list[int]]:
    """Return {name: [B] number of turns or tokens sampled by the policy}."""
    offsets = batch.jagged(RESPONSE_MASK).offsets
    counts = {}
    for name in PART_REWARDS:
        sums = np.append(0, np.cumsum(_part_ends(batch, name)))
        counts[name] = np.diff(sums[offsets]).tolist()
    return counts


def _part_rewards(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return the rewards [T], placed at each turn's last token or at each token, and a mask [T]
    bool of these positions; (None, None) if the reward returned neither `turn_rewards` nor
    `token_rewards`. A turn is a run of sampled tokens. Turns without a reward (because scoring
    failed, or the conversation was cut off) get 0.

    Raises:
        DataError: the rewards are not a list of numbers, or there are more of them than turns or
            tokens. The message names the row.
    """
    extras = values(batch, "reward_extra", {})
    returned = set().union(*extras)
    names = [name for name in PART_REWARDS if name in returned]
    if not names:
        return None, None
    name = names[0]
    ends = _part_ends(batch, name)
    offsets = batch.jagged(RESPONSE_MASK).offsets
    rewards = np.zeros(len(ends), np.float32)
    for row, (extra, failed) in enumerate(zip(extras, _failed(batch), strict=True)):
        start = offsets[row]
        places = start + np.flatnonzero(ends[start : offsets[row + 1]])
        given = [] if failed else extra.get(name, [])
        if not _are_numbers(given):
            raise DataError(
                f"row {row}: the reward returned {name}={given!r}, expected a list of numbers"
            )
        count = len(given)
        if count > len(places):
            raise DataError(f"row {row}: {_too_many(name, count, len(places))}")
        rewards[places[:count]] = given
    return torch.from_numpy(rewards), torch.from_numpy(ends)


def _are_numbers(given: object) -> bool:
    if not isinstance(given, list | tuple):
        return False
    return all(isinstance(value, int | float) for value in given)
