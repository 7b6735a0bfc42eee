"""Metrics of a training step, using verl-compatible names: of its batch, of its updates, and of the
ranks' observations, with a check that router replay was active on all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.role_table import CRITICS, ROLES
from hybridflow.data.packing import RESPONSE_MASK, lengths_read
from hybridflow.errors import RouterReplayError
from hybridflow.rollout.answer_statistics import pass_at
from hybridflow.trainer.mismatch import mismatch_metrics
from hybridflow.trainer.model_scores import agreement
from hybridflow.trainer.protocols import Update

_GB = 1e9
_GIB = 2**30  # verl's unit of metrics called gb


def log_prob_difference(batch: DataProto, version: int | None = None) -> tuple[float, float]:
    """Return the mean and largest |engine - trainer| log-prob difference over sampled tokens; if
    `version` is given, only over tokens sampled with this weight version. NaN if any value is NaN,
    0 if there are no tokens."""
    total = 0.0
    count = 0
    largest = [0.0]
    names = (RESPONSE_MASK, "rollout_log_probs", "old_log_probs")
    for piece in batch.pieces(names if version is None else (*names, "response_versions")):
        engine = sampled(piece, "rollout_log_probs")
        trainer = sampled(piece, "old_log_probs")
        difference = np.abs(engine - trainer)
        if version is not None:
            difference = difference[sampled(piece, "response_versions") == version]
        total += float(difference.sum(dtype=np.float64))
        count += len(difference)
        largest.append(float(difference.max(initial=0.0)))
    return total / max(count, 1), float(np.max(largest))


def kl_sums(batch: DataProto) -> np.ndarray:
    """Return the sums [B] float64 of old minus reference log-probability over each sample's sampled
    tokens."""
    found = [np.zeros(0)]
    for piece in batch.pieces((RESPONSE_MASK, "old_log_probs", "ref_log_probs")):
        old = piece.jagged("old_log_probs")
        reference = piece.jagged("ref_log_probs")
        mask = piece.jagged(RESPONSE_MASK).values
        difference = np.where(mask, old.values - reference.values, 0)
        sums = np.concatenate([[0.0], np.cumsum(difference, dtype=np.float64)])
        found.append(sums[old.offsets[1:]] - sums[old.offsets[:-1]])
    return np.concatenate(found)


def batch_metrics(batch: DataProto, scored: DataProto | None = None) -> dict[str, float]:
    """Return metrics of a finished batch: scores, advantages, lengths, entropy and log-prob
    differences.

    Scores and rewards include only samples with a response (as in verl). Lengths and the total
    number of tokens include every token that the model reads; all other metrics include only
    sampled tokens.

    Args:
        scored: the rows with log-probs and entropies from before the updates; None means all rows.
    """
    scored = batch if scored is None else scored
    answered = batch.lengths("response_ids") > 0
    metrics = answer_metrics(batch)
    # a flow may compute its own advantages, without rewards
    if "rewards" in batch:
        metrics |= spread("critic/rewards", batch["rewards"][answered])
    metrics |= _token_spread("critic/advantages", batch, "advantages")
    entropy = _token_spread("", scored, "entropys")
    metrics["actor/entropy"] = entropy.get("/mean", 0.0)
    if "rollout_log_probs" in batch:
        metrics |= _engine_metrics(scored)
    if "ref_log_probs" in batch:
        divergence = kl_sums(scored).sum()
        metrics["actor/ref_kl"] = float(divergence / max(_num_sampled(scored), 1))
    if "teacher_top_log_probs" in batch:
        metrics["teacher/top_mass"] = _top_mass(batch)
    for name in CRITICS.values():
        metrics |= _values_metrics(name, batch)
    return metrics


def _values_metrics(critic: str, batch: DataProto) -> dict[str, float]:
    """Return metrics of a critic's values and of the returns that it is trained on; empty if the
    batch has none.
    """
    prefix = ROLES[critic].prefix
    values = f"{prefix}values"
    returns = f"{prefix}returns"
    if values not in batch:
        return {}
    return {
        **_token_spread(f"{critic}/values", batch, values),
        **_token_spread(f"{critic}/returns", batch, returns),
        f"{critic}/vf_explained_var": _explained_variance(batch, values, returns),
    }


def answer_metrics(batch: DataProto) -> dict[str, float]:
    """Return score and length metrics of a batch before training on it."""
    responses = batch.lengths("response_ids")
    prompts = batch.lengths("prompt_ids")
    answered = responses > 0
    reasons = batch["finish_reason"]
    metrics = {
        "critic/score/mean": float("nan"),
        **spread("critic/score", batch["scores"][answered]),
        **spread("response_length", responses),
        "response_length/clip_ratio": float(np.mean(reasons == "length")),
        "response/aborted_ratio": float(np.mean(reasons == "abort")),
        **spread("prompt_length", prompts),
        "perf/total_num_tokens": float(responses.sum() + prompts.sum()),
        "critic/solved_groups": _share_of_groups(batch, 1.0),
        "critic/unsolved_groups": _share_of_groups(batch, 0.0),
        **_pass_at_k(batch),
        **_by_source(batch, answered),
    }
    if "rm_scores" in batch:
        metrics |= spread("reward_model/score", batch["rm_scores"])
    return metrics


def _pass_at_k(batch: DataProto) -> dict[str, float]:
    """Return critic/pass@k (`pass_at`)."""
    shares = pass_at(batch["scores"], batch["uid"])
    return {f"critic/pass@{k}": share for k, share in shares.items()}


def _by_source(batch: DataProto, answered: np.ndarray) -> dict[str, float]:
    """Return critic/score_of/SOURCE/mean for each data source, if there are several."""
    if "data_source" not in batch:
        return {}
    sources = batch["data_source"]
    found = {}
    for source in dict.fromkeys(sources.tolist()):
        rows = (sources == source) & answered
        if rows.any():
            found[f"critic/score_of/{source}/mean"] = float(np.mean(batch["scores"][rows]))
    return found if len(found) > 1 else {}


def _engine_metrics(scored: DataProto) -> dict[str, float]:
    """Return the log-prob differences between the sampling engines and the trainer."""
    difference, largest = log_prob_difference(scored)
    found = {"rollout/logprob_diff/mean": difference, "rollout/logprob_diff/max": largest}
    return found | mismatch_metrics(scored)


def preference_metrics(batch: DataProto) -> dict[str, float]:
    """Return metrics of the policy's preferences before the step's updates, based on the log-ratio
    of policy to reference for each answer. preference/accuracy is the fraction of pairs of answers
    to the same prompt that the policy ranks in the same order as the scores (ties count half).
    preference/margin is the mean difference between the log-ratios of the best and the worst
    answer.
    """
    ratios = kl_sums(batch)
    scores = np.asarray(batch["scores"])
    uid = np.asarray(batch["uid"])
    order = np.lexsort((scores, uid))  # sorted by prompt, then by score
    _, worst, count = np.unique(uid[order], return_index=True, return_counts=True)
    best = order[worst + count - 1]
    worst = order[worst]
    differ = scores[best] > scores[worst]
    if not differ.any():
        return {}
    accuracy = agreement(ratios, scores, uid)
    assert accuracy is not None
    margins = ratios[best] - ratios[worst]
    return {
        "preference/accuracy": accuracy,
        "preference/margin": float(margins[differ].mean()),
    }


def _top_mass(batch: DataProto) -> float:
    """Return the total probability of the teacher's most likely tokens, averaged over sampled
    tokens."""
    total = 0.0
    count = 0
    for piece in batch.pieces((RESPONSE_MASK, "teacher_top_log_probs")):
        values = sampled(piece, "teacher_top_log_probs")
        total += float(np.exp(values, dtype=np.float64).sum())
        count += len(values)
    return total / max(count, 1)


def _explained_variance(batch: DataProto, values: str, returns: str) -> float:
    """Return the share of the returns' variance explained by the values before the step's updates:
    1 - var(returns - values) / var(returns)."""
    sums = np.zeros(4)
    count = 0
    for piece in batch.pieces((RESPONSE_MASK, values, returns)):
        wanted = sampled(piece, returns).astype(np.float64)
        rest = wanted - sampled(piece, values)
        sums += [rest.sum(), (rest**2).sum(), wanted.sum(), (wanted**2).sum()]
        count += len(wanted)
    if count < 2:
        return float("nan")
    left, whole = ((sums[i + 1] - sums[i] ** 2 / count) / (count - 1) for i in (0, 2))
    return float(1.0 - left / (whole + 1e-5))


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return metrics averaged over the policy's updates in a step; empty if there are none
    (`trainer.critic_warmup`). `actor/first_ppo_kl` is the first update's `actor/ppo_kl`, if the
    loss reports it. Old and new weights are equal in that update, so the value is 0 if the update
    is compared with its own log-probs.
    """
    if not updates:
        return {}
    metrics = _update_means(updates, "actor", "actor/loss")
    squared = metrics.pop("rollout_correction/weight_squared", 0.0)
    if squared:
        weight = metrics["rollout_correction/weight"]
        metrics["rollout_correction/ess"] = weight**2 / squared
    first = updates[0].means
    if "actor/ppo_kl" in first:
        metrics["actor/first_ppo_kl"] = first["actor/ppo_kl"]
    return metrics


def critic_metrics(name: str, updates: Sequence[Update]) -> dict[str, float]:
    """Return metrics averaged over a critic's updates in a step. The loss reports them as
    `critic/...`, and they are renamed to `NAME/...`.
    """
    metrics = _update_means(updates, name, f"{name}/vf_loss")
    return {re.sub("^critic/", f"{name}/", key): value for key, value in metrics.items()}


def _update_means(updates: Sequence[Update], role: str, loss: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.means.items():
            values.setdefault(name, []).append(value)
    metrics = {name: float(np.mean(found)) for name, found in values.items()}
    metrics[loss] = metrics.pop("loss", float("nan"))
    norms = [update.grad_norm for update in updates if update.applied]
    metrics[f"{role}/grad_norm"] = float(np.mean(norms)) if norms else float("nan")
    metrics[f"{role}/lr"] = updates[-1].lr
    metrics[f"{role}/skipped_updates"] = float(sum(not update.applied for update in updates))
    return metrics


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Return name/mean, name/max and name/min; empty if there are no values."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def _token_spread(name: str, batch: DataProto, column: str) -> dict[str, float]:
    """Return mean, maximum and minimum over the sampled tokens of a jagged column."""
    count = 0
    totals = []
    highest = []
    lowest = []
    for piece in batch.pieces([RESPONSE_MASK, column]):
        values = sampled(piece, column)
        if len(values):
            count += len(values)
            totals.append(float(values.sum(dtype=np.float64)))
            highest.append(values.max())
            lowest.append(values.min())
    if not count:
        return {}
    return {
        f"{name}/mean": sum(totals) / count,
        f"{name}/max": float(np.max(highest)),
        f"{name}/min": float(np.min(lowest)),
    }


def sampled(piece: DataProto, column: str) -> np.ndarray:
    """Return the values of a jagged column at the tokens sampled by the policy."""
    mask = piece.jagged(RESPONSE_MASK).values
    return piece.jagged(column).values[mask]


def _num_sampled(batch: DataProto) -> int:
    count = 0
    for piece in batch.pieces([RESPONSE_MASK]):
        count += int(piece.jagged(RESPONSE_MASK).values.sum())
    return count


def _share_of_groups(batch: DataProto, score: float) -> float:
    """Return the fraction of prompts whose samples all have this score, and therefore contribute no
    gradient."""
    _, group = np.unique(batch["uid"], return_inverse=True)
    sizes = np.bincount(group)
    hits = np.bincount(group, weights=batch["scores"] == score)
    return float(np.mean(hits == sizes))


def memory_metrics(observations: Sequence[Mapping[str, Any]], role: str) -> dict[str, float]:
    """Return the highest memory peak of any rank in GiB, for the whole step and per worker method,
    and the amount that the role has offloaded in GB (10^9 bytes).

    Args:
        observations: results of `RoleMemory.take` from all ranks.
    """
    phases: dict[str, float] = {}
    for observed in observations:
        for phase, peak in observed["memory"].items():
            phases[phase] = max(phases.get(phase, 0.0), peak / _GIB)
    metrics = {f"perf/max_memory_allocated_gb/{phase}": peak for phase, peak in phases.items()}
    if phases:
        metrics["perf/max_memory_allocated_gb"] = max(phases.values())
        reserved = max(observed["reserved"] for observed in observations)
        metrics["perf/max_memory_reserved_gb"] = reserved / _GIB
    offloaded = max(observed["offloaded"] for observed in observations)
    metrics[f"perf/offloaded_gb/{role}"] = offloaded / _GB
    return metrics


def model_metrics(observations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the number of trainable parameters (all weights, or only the adapters) and, if a sync
    sends merged copies of weights, the largest size in GB of these copies on any rank.
    """
    metrics = {}
    if observations:
        metrics["actor/trainable_parameters"] = float(observations[0]["trainable"])
    copied = max((observed["copied"] for observed in observations), default=0)
    if copied:
        metrics["sync/merged_gb"] = copied / _GB
    return metrics


def replayed_passes(kind: str, ppo_epochs: int) -> tuple[int, int]:
    """Return whether passes without gradients, and whether update passes, use recorded experts with
    this value of `actor.router_replay`.
    """
    return {"none": (0, 0), "compare": (1, 0), "r2": (0, ppo_epochs), "r3": (1, ppo_epochs)}[kind]


def token_layers(
    prompts: np.ndarray,
    responses: np.ndarray,
    routers: int,
    kind: str,
    routed: np.ndarray | None = None,
) -> int:
    """Return the number of token-layers with recorded experts in one pass over a batch.

    Args:
        prompts, responses: [B] number of tokens in each sample.
        routers: number of layers with experts.
        routed: [B] number of tokens that an engine has routed in each sample. Required for
            conversations, where it does not follow from the lengths, because text shown after the
            last answer is not routed.
        kind: `actor.router_replay`. For r3 and compare, an engine does not route a sample's last
            token, nor any token of a sample with an empty response. For r2, the trainer routes
            every token that its passes read.
    """
    if kind == "r2":
        tokens = lengths_read(prompts + responses)
    elif routed is None:
        tokens = (prompts + responses - 1)[responses > 0]
    else:
        tokens = routed
    return int(tokens.sum()) * routers


def replay_metrics(
    observations: Sequence[Mapping[str, Any]],
    prompts: np.ndarray,
    responses: np.ndarray,
    kind: str,
    ppo_epochs: int,
    routed: np.ndarray | None = None,
) -> dict[str, float]:
    """Return the number of token-layers replayed on all ranks, and the fractions for which the live
    router would have chosen other experts: `differing` compares trainer and engine at equal
    weights, `drifted` measures the change during updates.

    Args:
        observations: results of `PolicyWorker.take_observations` from all ranks.
        prompts, responses, kind, routed: see `token_layers`.
        ppo_epochs: number of update epochs over the batch.

    Raises:
        RouterReplayError: the ranks' routers used more or fewer token-layers than were sampled.
    """
    if kind == "none":
        return {}
    counts = {}
    for name in observations[0]["routes"]:
        counts[name] = sum(observed["routes"][name] for observed in observations)
    once = token_layers(prompts, responses, counts["routers"], kind, routed)
    scored, trained = replayed_passes(kind, ppo_epochs)
    expected = once * (scored + trained)
    if not counts["sent"] == counts["used"] == expected or counts["mismatched"]:
        raise RouterReplayError(
            f"actor.router_replay={kind}: {expected} token-layers have recorded experts "
            f"({counts['routers']} layers with experts), but {counts['sent']} reached the routers "
            f"and {counts['used']} were used, {counts['mismatched']} of them with other experts"
        )
    metrics = {
        "tokens": float(counts["used"] if kind != "compare" else 0),
        "mismatches": float(counts["mismatched"]),
    }
    if scored:
        metrics["differing"] = counts["differing"] / max(once * scored, 1)
    if trained:
        metrics["drifted"] = counts["drifted"] / max(once * trained, 1)
    return {f"actor/router_replay/{name}": value for name, value in metrics.items()}
