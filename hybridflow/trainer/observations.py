"""Metrics computed from the observations that ranks collect during a step, and a check that router
replay was active on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.data.packing import lengths_read
from hybridflow.errors import RouterReplayError

_GB = 1e9
_GIB = 2**30  # verl's unit of metrics called gb


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
        metrics["perf/max_memory_reserved_gb"] = (
            max(observed["reserved"] for observed in observations) / _GIB
        )
    metrics[f"perf/offloaded_gb/{role}"] = (
        max(observed["offloaded"] for observed in observations) / _GB
    )
    return metrics


def model_metrics(observations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the number of trainable parameters (all weights, or only the adapters) and, if a sync
    sends merged copies of weights, the largest size in GB of these copies on any rank.
    """
    metrics = (
        {"actor/trainable_parameters": float(observations[0]["trainable"])} if observations else {}
    )
    if copied := max((observed["copied"] for observed in observations), default=0):
        metrics["sync/merged_gb"] = copied / _GB
    return metrics


def over_roles(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the `memory_metrics` of all roles. If several roles report the same metric (the step's
    peaks), the maximum is used.
    """
    merged: dict[str, float] = {}
    for one in metrics:
        merged |= {name: max(value, merged.get(name, value)) for name, value in one.items()}
    return merged


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
    else:
        tokens = (prompts + responses - 1)[responses > 0] if routed is None else routed
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
    counts = {
        name: sum(observed["routes"][name] for observed in observations)
        for name in observations[0]["routes"]
    }
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
