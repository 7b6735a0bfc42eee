"""What the policy's ranks noticed during a step, as metrics; and the proof that replay was live over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.errors import RouterReplayError

_GB = 1e9


def memory_metrics(observations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest peak of any rank, in GB (10^9 bytes): over the step, and of each worker method."""
    phases: dict[str, float] = {}
    for observed in observations:
        for phase, peak in observed["memory"].items():
            phases[phase] = max(phases.get(phase, 0.0), peak / _GB)
    metrics = {f"perf/max_memory_allocated_gb/{phase}": peak for phase, peak in phases.items()}
    if phases:
        metrics["perf/max_memory_allocated_gb"] = max(phases.values())
        metrics["perf/max_memory_reserved_gb"] = max(observed["reserved"] for observed in observations) / _GB
    return metrics


def expected_token_layers(prompts: np.ndarray, responses: np.ndarray, routers: int, kind: str, ppo_epochs: int) -> int:
    """Token-layers that a step sends to routers.

    Args:
        prompts, responses: [B] tokens of each sample.
        routers: layers with experts.
        kind: `actor.router_replay`. r3 and compare: an engine does not route the last token of a sample, and none of an empty response.
        ppo_epochs: updates replay the batch so often, and r3's old-log-prob pass once more.
    """
    tokens = int((prompts + responses).sum()) if kind == "r2" else int((prompts + responses - 1)[responses > 0].sum())
    passes = {"none": 0, "compare": 1, "r2": ppo_epochs, "r3": 1 + ppo_epochs}[kind]
    return tokens * routers * passes


def replay_metrics(
    observations: Sequence[Mapping[str, Any]], prompts: np.ndarray, responses: np.ndarray, kind: str, ppo_epochs: int
) -> dict[str, float]:
    """Token-layers replayed over all ranks, and the share of them for which the live router would have chosen otherwise.

    Args:
        observations: `PolicyWorker.take_observations` of every rank.
        prompts, responses, kind, ppo_epochs: see `expected_token_layers`.

    Raises:
        RouterReplayError: the ranks' routers used another number of token-layers than were sampled.
    """
    if kind == "none":
        return {}
    counts = {name: sum(observed["routes"][name] for observed in observations) for name in observations[0]["routes"]}
    expected = expected_token_layers(prompts, responses, counts["routers"], kind, ppo_epochs)
    if not counts["sent"] == counts["used"] == expected or counts["mismatched"]:
        raise RouterReplayError(
            f"actor.router_replay={kind}: {expected} token-layers have recorded experts ({counts['routers']} layers with experts), "
            f"{counts['sent']} reached the routers, {counts['used']} were used, {counts['mismatched']} with other experts"
        )
    return {
        "actor/router_replay/tokens": float(counts["used"]),
        "actor/router_replay/mismatches": float(counts["mismatched"]),
        "actor/router_replay/differing": counts["differing"] / max(counts["used"], 1),
    }
