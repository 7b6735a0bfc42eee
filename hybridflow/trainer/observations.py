"""What the policy's ranks noticed during a step, as metrics; and the proof that replay was live
over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.data.micro_batches import lengths_read
from hybridflow.errors import RouterReplayError

_GB = 1e9


def memory_metrics(observations: Sequence[Mapping[str, Any]], role: str) -> dict[str, float]:
    """The largest peak of any rank, in GB (10^9 bytes): over the step, and of each worker method;
    and what of the role was off the device.

    Args:
        observations: `RoleMemory.take` of every rank.
    """
    phases: dict[str, float] = {}
    for observed in observations:
        for phase, peak in observed["memory"].items():
            phases[phase] = max(phases.get(phase, 0.0), peak / _GB)
    metrics = {f"perf/max_memory_allocated_gb/{phase}": peak for phase, peak in phases.items()}
    if phases:
        metrics["perf/max_memory_allocated_gb"] = max(phases.values())
        metrics["perf/max_memory_reserved_gb"] = (
            max(observed["reserved"] for observed in observations) / _GB
        )
    metrics[f"perf/offloaded_gb/{role}"] = (
        max(observed["offloaded"] for observed in observations) / _GB
    )
    return metrics


def model_metrics(observations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many numbers training changes: all weights of the model, or its adapters; and, where a
    sync sends merged copies of weights, their GB on the rank with most.
    """
    metrics = (
        {"actor/trainable_parameters": float(observations[0]["trainable"])} if observations else {}
    )
    if copied := max((observed["copied"] for observed in observations), default=0):
        metrics["sync/merged_gb"] = copied / _GB
    return metrics


def over_roles(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`memory_metrics` of all roles as one: of what two of them measured (the step's peaks), the
    larger."""
    merged: dict[str, float] = {}
    for one in metrics:
        merged |= {name: max(value, merged.get(name, value)) for name, value in one.items()}
    return merged


def replayed_passes(kind: str, ppo_epochs: int) -> tuple[int, int]:
    """(passes without gradient, passes of updates) that see recorded experts, for a value of
    `actor.router_replay`."""
    return {"none": (0, 0), "compare": (1, 0), "r2": (0, ppo_epochs), "r3": (1, ppo_epochs)}[kind]


def token_layers(
    prompts: np.ndarray,
    responses: np.ndarray,
    routers: int,
    kind: str,
    routed: np.ndarray | None = None,
) -> int:
    """Token-layers with recorded experts in one pass over a batch.

    Args:
        prompts, responses: [B] tokens of each sample.
        routers: layers with experts.
        routed: [B] tokens of each sample that an engine has routed, where that does not follow from
            the lengths: what a conversation shows after its last answer is none of them.
        kind: `actor.router_replay`. r3 and compare: an engine does not route the last token of a
            sample, and none of an empty response. r2: the trainer routes what its passes read.
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
    """Token-layers replayed over all ranks, and the shares of them for which the live router would
    have chosen otherwise: `differing` from the engine at the same weights, `drifted` during
    updates.

    Args:
        observations: `PolicyWorker.take_observations` of every rank.
        prompts, responses, kind, routed: see `token_layers`.
        ppo_epochs: updates go over the batch so often.

    Raises:
        RouterReplayError: the ranks' routers used another number of token-layers than were sampled.
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
            f"({counts['routers']} layers with experts), {counts['sent']} reached the routers, "
            f"{counts['used']} were used, {counts['mismatched']} with other experts"
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
