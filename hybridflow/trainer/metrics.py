"""The numbers of one step, under the names dashboards know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridflow.protocol import DataProto, Jagged
from hybridflow.trainer.protocols import Update


def log_prob_difference(batch: DataProto) -> np.ndarray:
    """[sum(t)] |engine - trainer| log-probability of each sampled token."""
    return np.abs(batch.jagged("rollout_log_probs").values - batch.jagged("old_log_probs").values)


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Scores, advantages, lengths, entropy and the log-prob difference of a finished batch."""
    responses, difference = batch.jagged("response_ids").lengths, log_prob_difference(batch)
    metrics = {
        **_spread("critic/score", batch["scores"]),
        **_spread("critic/rewards", batch["rewards"]),
        **_spread("critic/advantages", batch.jagged("advantages").values),
        **_spread("response_length", responses),
        "response_length/clip_ratio": float(np.mean(batch["finish_reason"] == "length")),
        "response/aborted_ratio": float(np.mean(batch["finish_reason"] == "abort")),
        **_spread("prompt_length", batch.jagged("prompt_ids").lengths),
        "actor/entropy": _mean(batch.jagged("entropys").values),
        "rollout/logprob_diff/mean": _mean(difference),
        "rollout/logprob_diff/max": float(difference.max(initial=0.0)),
        "perf/total_num_tokens": float(responses.sum() + batch.jagged("prompt_ids").lengths.sum()),
        "critic/solved_groups": _share_of_groups(batch, 1.0),
        "critic/unsolved_groups": _share_of_groups(batch, 0.0),
    }
    if "ref_log_probs" in batch:
        metrics["actor/ref_kl"] = _mean(batch.jagged("old_log_probs").values - batch.jagged("ref_log_probs").values)
    return metrics


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over the step's updates; `actor/first_ppo_kl` is that of the first, where old and new weights are the same."""
    names = dict.fromkeys(name for update in updates for name in update.means)
    metrics = {name: float(np.mean([u.means[name] for u in updates if name in u.means])) for name in names}
    metrics["actor/loss"] = metrics.pop("loss", float("nan"))
    metrics["actor/first_ppo_kl"] = updates[0].means.get("actor/ppo_kl", float("nan"))
    metrics["actor/grad_norm"] = float(np.mean([update.grad_norm for update in updates]))
    metrics["actor/lr"] = updates[-1].lr
    metrics["actor/skipped_updates"] = float(sum(not update.applied for update in updates))
    return metrics


def spread_over_tokens(values_B: np.ndarray, lengths_B: np.ndarray) -> Jagged:
    """A value per sample as a jagged column with that value at each of its tokens."""
    return Jagged.from_lengths(np.repeat(values_B.astype(np.float32), lengths_B), lengths_B)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"{name}/mean": float(np.mean(values)), f"{name}/max": float(np.max(values)), f"{name}/min": float(np.min(values))}


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else 0.0


def _share_of_groups(batch: DataProto, score: float) -> float:
    """Share of prompts all of whose samples have this score: they give no gradient."""
    _, group = np.unique(batch["uid"], return_inverse=True)
    sizes = np.bincount(group)
    return float(np.mean(np.bincount(group, weights=batch["scores"] == score) == sizes))
