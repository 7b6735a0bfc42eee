"""Search for the smallest configuration change that makes a job fit its devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from hybridflow.config import check, derived
from hybridflow.config.schema import RunConfig
from hybridflow.errors import HybridFlowError
from hybridflow.models.check import problems as model_problems
from hybridflow.planning.devices import Machines
from hybridflow.planning.job import Assumed, job_of
from hybridflow.planning.plan import Plan, make_plan

Change = Mapping[str, Any]


def refused(config: RunConfig) -> list[str]:
    """Return the reasons why a run with this configuration would be rejected at startup. Does not
    read data or model files."""
    return check.problems(config, files=False) or list(dict.fromkeys(model_problems(config)))


def with_values(config: Any, change: Change) -> Any:
    """Return a copy of a configuration with `change` ({dotted key: value}) applied."""
    for key, value in change.items():
        first, _, rest = key.partition(".")
        changed = with_values(getattr(config, first), {rest: value}) if rest else value
        config = replace(config, **{first: changed})
    return config


def nearest_change(
    config: RunConfig, machines: Machines, assumed: Assumed, hf: Any = None
) -> Change | None:
    """Return the first valid change that makes the job fit, or None. Single changes are tried
    first, then pairs."""
    single = list(_changes(config))
    candidates = list(single)
    for one, other in combinations(single, 2):
        if one.keys().isdisjoint(other):
            candidates.append({**one, **other})
    for change in candidates:
        if _fits(with_values(config, change), machines, assumed, hf):
            return change
    return None


def _fits(config: RunConfig, machines: Machines, assumed: Assumed, hf: Any) -> bool:
    try:
        if refused(config):
            return False
        wanted = replace(machines, nodes=max(machines.nodes, config.cluster.nodes))
        plan: Plan = make_plan(job_of(config, wanted, assumed, hf))
    except HybridFlowError:
        return False
    return plan.fits


def _changes(config: RunConfig) -> Iterator[Change]:
    """Yield candidate changes, cheapest first. The first candidates only make steps slower; later
    ones change the layout or add devices."""
    actor = config.actor
    rollout = config.rollout
    sections = ["actor", *derived.critics(config)]
    for section in sections:
        offload = getattr(config, section).offload
        missing = {}
        for part in ("weights", "gradients", "optimizer"):
            if not getattr(offload, part):
                missing[f"{section}.offload.{part}"] = True
        if missing and (section == "actor" or derived.is_colocated(config, section)):
            yield missing
    if rollout.sync.commit == "staged":
        yield {"rollout.sync.commit": "in_place"}
    for fraction in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        if abs(fraction - rollout.mem_fraction_static) > 0.01:
            yield {"rollout.mem_fraction_static": fraction}
    if actor.recompute == "none":
        yield {"actor.recompute": "selective"}
        yield {"actor.recompute": "full"}
    if actor.recompute == "selective":
        yield {"actor.recompute": "full", "actor.recompute_modules": ("core_attn",)}
    least = derived.padded_length(derived.max_sequence_length(config), actor.parallel)
    if actor.max_tokens_per_micro_batch > least:
        yield {"actor.max_tokens_per_micro_batch": least}
    if actor.logits_chunk_tokens > 256:
        yield {"actor.logits_chunk_tokens": 256}
    yield from _layouts(config)


def _layouts(config: RunConfig) -> Iterator[Change]:
    parallel = config.actor.parallel
    rollout = config.rollout
    for size in (2, 4, 8):
        yield {"actor.parallel.tensor": parallel.tensor * size, "actor.parallel.sequence": True}
        yield {"actor.parallel.expert": parallel.expert * size}
        yield {"actor.parallel.pipeline": parallel.pipeline * size}
        if rollout.num_engines % size == 0:
            yield {
                "rollout.tensor": rollout.tensor * size,
                "rollout.num_engines": rollout.num_engines // size,
            }
    engines = derived.world_size(config) // (rollout.tensor * rollout.pipeline)
    if engines and derived.pool_of(config, "rollout") == "actor":
        yield {"rollout.num_engines": engines}
    for factor in (2, 4, 8):
        yield {
            "cluster.nodes": config.cluster.nodes * factor,
            "rollout.num_engines": rollout.num_engines * factor,
        }
