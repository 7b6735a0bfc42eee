"""The numbers of one step, under the names dashboards know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.data.micro_batches import RESPONSE_MASK
from hybridflow.trainer.mismatch import mismatch_metrics
from hybridflow.trainer.model_scores import agreement
from hybridflow.trainer.protocols import Update


def log_prob_difference(batch: DataProto, version: int | None = None) -> tuple[float, float]:
    """Mean and largest |engine - trainer| log-probability of the sampled tokens, with `version` of
    those that its weights made; NaN where one is NaN, 0 without tokens."""
    total = 0.0
    count = 0
    largest = [0.0]
    names = (RESPONSE_MASK, "rollout_log_probs", "old_log_probs")
    for piece in batch.pieces(names if version is None else (*names, "response_versions")):
        difference = np.abs(sampled(piece, "rollout_log_probs") - sampled(piece, "old_log_probs"))
        if version is not None:
            difference = difference[sampled(piece, "response_versions") == version]
        total = total + float(difference.sum(dtype=np.float64))
        count = count + len(difference)
        largest.append(float(difference.max(initial=0.0)))
    return total / max(count, 1), float(np.max(largest))


def kl_sums(batch: DataProto) -> np.ndarray:
    """[B] float64: old less reference log-probability, summed over the sampled tokens of each
    sample."""
    found = [np.zeros(0)]
    for piece in batch.pieces((RESPONSE_MASK, "old_log_probs", "ref_log_probs")):
        old = piece.jagged("old_log_probs")
        mask = piece.jagged(RESPONSE_MASK).values
        difference = np.where(mask, old.values - piece.jagged("ref_log_probs").values, 0)
        sums = np.concatenate([[0.0], np.cumsum(difference, dtype=np.float64)])
        found.append(sums[old.offsets[1:]] - sums[old.offsets[:-1]])
    return np.concatenate(found)


def batch_metrics(batch: DataProto, scored: DataProto | None = None) -> dict[str, float]:
    """Scores, advantages, lengths, entropy and the log-prob difference of a finished batch.

    Scores and rewards are those of samples with a response (as in verl); lengths and the total
    number of tokens count everything that the model reads, all else sampled tokens alone.

    Args:
        scored: the rows whose log-probs and entropies before the updates are known; None: all of
            them.
    """
    scored = batch if scored is None else scored
    answered = batch.lengths("response_ids") > 0
    metrics = {
        **answer_metrics(batch),
        # a flow may have made advantages of its own, without rewards
        **(spread("critic/rewards", batch["rewards"][answered]) if "rewards" in batch else {}),
        **_token_spread("critic/advantages", batch, "advantages"),
        "actor/entropy": _token_spread("", scored, "entropys").get("/mean", 0.0),
        **(_engine_metrics(scored) if "rollout_log_probs" in batch else {}),
    }
    if "ref_log_probs" in batch:
        metrics["actor/ref_kl"] = float(kl_sums(scored).sum() / max(_num_sampled(scored), 1))
    if "teacher_top_log_probs" in batch:
        metrics["teacher/top_mass"] = _top_mass(batch)
    if "values" in batch:
        metrics |= _token_spread("critic/values", batch, "values") | _token_spread(
            "critic/returns", batch, "returns"
        )
        metrics["critic/vf_explained_var"] = _explained_variance(batch)
    return metrics


def answer_metrics(batch: DataProto) -> dict[str, float]:
    """Scores and lengths of a batch that was not trained on yet."""
    responses = batch.lengths("response_ids")
    prompts = batch.lengths("prompt_ids")
    metrics = {
        "critic/score/mean": float("nan"),
        **spread("critic/score", batch["scores"][responses > 0]),
        **spread("response_length", responses),
        "response_length/clip_ratio": float(np.mean(batch["finish_reason"] == "length")),
        "response/aborted_ratio": float(np.mean(batch["finish_reason"] == "abort")),
        **spread("prompt_length", prompts),
        "perf/total_num_tokens": float(responses.sum() + prompts.sum()),
        "critic/solved_groups": _share_of_groups(batch, 1.0),
        "critic/unsolved_groups": _share_of_groups(batch, 0.0),
    }
    return metrics | (
        spread("reward_model/score", batch["rm_scores"]) if "rm_scores" in batch else {}
    )


def _engine_metrics(scored: DataProto) -> dict[str, float]:
    """How far the engines that sampled are from the trainer."""
    difference, largest = log_prob_difference(scored)
    found = {"rollout/logprob_diff/mean": difference, "rollout/logprob_diff/max": largest}
    return found | mismatch_metrics(scored)


def preference_metrics(batch: DataProto) -> dict[str, float]:
    """How the policy of before the step's updates prefers answers, by their log-ratio to the
    reference: preference/accuracy, the share of pairs of answers to one prompt that it orders as
    their scores do (ties: half), and preference/margin, the mean difference of log-ratios of the
    best and the worst answer."""
    ratios = kl_sums(batch)
    scores = np.asarray(batch["scores"])
    uid = np.asarray(batch["uid"])
    order = np.lexsort((scores, uid))  # prompt after prompt, the worst answer first
    _, worst, count = np.unique(uid[order], return_index=True, return_counts=True)
    worst, best = order[worst], order[worst + count - 1]
    differ = scores[best] > scores[worst]
    if not differ.any():
        return {}
    accuracy = agreement(ratios, scores, uid)
    assert accuracy is not None
    return {
        "preference/accuracy": accuracy,
        "preference/margin": float((ratios[best] - ratios[worst])[differ].mean()),
    }


def _top_mass(batch: DataProto) -> float:
    """Probability that the teacher gives to its most likely tokens together; mean over sampled
    tokens."""
    total = 0.0
    count = 0
    for piece in batch.pieces((RESPONSE_MASK, "teacher_top_log_probs")):
        values = sampled(piece, "teacher_top_log_probs")
        total = total + float(np.exp(values, dtype=np.float64).sum())
        count = count + len(values)
    return total / max(count, 1)


def _explained_variance(batch: DataProto) -> float:
    """How well values (before the step's updates) explain returns: 1 - var(returns - values) /
    var(returns)."""
    sums = np.zeros(4)
    count = 0
    for piece in batch.pieces((RESPONSE_MASK, "values", "returns")):
        returns = sampled(piece, "returns").astype(np.float64)
        rest = returns - sampled(piece, "values")
        sums += [rest.sum(), (rest**2).sum(), returns.sum(), (returns**2).sum()]
        count += len(returns)
    if count < 2:
        return float("nan")
    left, whole = ((sums[i + 1] - sums[i] ** 2 / count) / (count - 1) for i in (0, 2))
    return float(1.0 - left / (whole + 1e-5))


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over the policy's updates of a step; `actor/first_ppo_kl` is that of the first, where
    old and new weights are the same, where the loss reports `actor/ppo_kl`. It is 0 where that
    update compares with its own values.

    Without updates (`trainer.critic_warmup`), nothing.
    """
    if not updates:
        return {}
    metrics = _update_means(updates, "actor", "actor/loss")
    if squared := metrics.pop("rollout_correction/weight_squared", 0.0):
        metrics["rollout_correction/ess"] = metrics["rollout_correction/weight"] ** 2 / squared
    if "actor/ppo_kl" in updates[0].means:
        metrics["actor/first_ppo_kl"] = updates[0].means["actor/ppo_kl"]
    return metrics


def critic_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over the critic's updates of a step; without a critic, nothing."""
    return _update_means(updates, "critic", "critic/vf_loss") if updates else {}


def _update_means(updates: Sequence[Update], role: str, loss: str) -> dict[str, float]:
    names = dict.fromkeys(name for update in updates for name in update.means)
    metrics = {
        name: float(np.mean([u.means[name] for u in updates if name in u.means])) for name in names
    }
    metrics[loss] = metrics.pop("loss", float("nan"))
    norms = [update.grad_norm for update in updates if update.applied]
    metrics[f"{role}/grad_norm"] = float(np.mean(norms)) if norms else float("nan")
    metrics[f"{role}/lr"] = updates[-1].lr
    metrics[f"{role}/skipped_updates"] = float(sum(not update.applied for update in updates))
    return metrics


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """name/mean, name/max and name/min; nothing without values."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def _token_spread(name: str, batch: DataProto, column: str) -> dict[str, float]:
    """`spread` over the sampled tokens of a jagged column."""
    parts = (sampled(piece, column) for piece in batch.pieces([RESPONSE_MASK, column]))
    spreads = [
        (float(values.sum(dtype=np.float64)), len(values), values.max(), values.min())
        for values in parts
        if len(values)
    ]
    if not spreads:
        return {}
    totals, counts, highest, lowest = zip(*spreads, strict=True)
    return {
        f"{name}/mean": sum(totals) / sum(counts),
        f"{name}/max": float(np.max(highest)),
        f"{name}/min": float(np.min(lowest)),
    }


def sampled(piece: DataProto, column: str) -> np.ndarray:
    """Values of a jagged column at the tokens that the policy sampled."""
    return piece.jagged(column).values[piece.jagged(RESPONSE_MASK).values]


def _num_sampled(batch: DataProto) -> int:
    return sum(
        int(piece.jagged(RESPONSE_MASK).values.sum()) for piece in batch.pieces([RESPONSE_MASK])
    )


def _share_of_groups(batch: DataProto, score: float) -> float:
    """Share of prompts all of whose samples have this score: they give no gradient."""
    _, group = np.unique(batch["uid"], return_inverse=True)
    sizes = np.bincount(group)
    return float(np.mean(np.bincount(group, weights=batch["scores"] == score) == sizes))
