"""Comparison of a run's measurements with the predictions made by `hybridflow plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import RunConfig
from hybridflow.device.platform import Platform
from hybridflow.errors import HybridFlowError
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.planning.devices import read_cluster
from hybridflow.planning.job import Assumed, job_of
from hybridflow.planning.plan import Plan, make_plan
from hybridflow.trainer.groups import ModelGroup
from hybridflow.trainer.session import Session
from hybridflow.workers.role import RoleWorker

# {the loop's phase name: the planner's phase name}
PHASES = {
    "gen": "generation",
    **{role.phase: role.planned_as for role in ROLES.values()},
    **{f"update_{name}": f"update {name}" for name, role in ROLES.items() if role.trains},
    "update_weights": "weight sync",
    "step": "step",
}


async def compare(
    config: RunConfig,
    hf_config: Mapping[str, Any],
    session: Session,
    roles: Mapping[str, ModelGroup],
) -> dict[str, Any]:
    """Return planned and measured values for `summary.json`: bytes per part of each role on its
    largest rank, bytes of weights per engine rank, and seconds per phase, averaged over all steps
    but the first. The plan uses the sample lengths observed in the run. If planning fails, the
    result contains the reason instead.
    """
    try:
        held = {name: _most(await role.call(RoleWorker.part_bytes)) for name, role in roles.items()}
        steps = [
            line
            for line in read_jsonl(session.folder / "metrics.jsonl")
            if line.get("phase") == "train"
        ]
        plan = _plan(config, hf_config, steps)
    except HybridFlowError as error:
        return {"unknown": str(error)}
    figures = plan.figures()
    expected = figures["resident"]
    memory = {
        role: {part: _pair(size, held[role].get(part)) for part, size in parts.items()}
        for role, parts in expected.items()
        if role in held
    } | _engines(plan, steps)
    seconds = {phase.name: phase.seconds for phase in plan.phases} | {"step": plan.seconds}
    later = steps[1:] or steps
    measured = {
        name: mean(values)
        for name in PHASES
        if (values := [line[f"timing_s/{name}"] for line in later if f"timing_s/{name}" in line])
    }
    phases = figures["phases"]
    for phase, begin in zip(phases, _measured_begins(plan, measured), strict=True):
        phase["measured_begin"] = begin
    return {
        "device": plan.job.machines.name,
        # for the report's charts
        "plan": {"phases": phases, "device_bytes": figures["device_bytes"]},
        "bytes": memory,
        "seconds": {
            PHASES[name]: _pair(seconds[PHASES[name]], value)
            for name, value in measured.items()
            if PHASES[name] in seconds
        },
    }


def _measured_begins(plan: Plan, measured: Mapping[str, float]) -> list[float]:
    """Return the start time of each phase within a step, derived from the measured durations."""
    took = {PHASES[name]: seconds for name, seconds in measured.items()}
    return replace(
        plan, phases=tuple(replace(one, seconds=took.get(one.name, 0.0)) for one in plan.phases)
    ).begins


def _plan(config: RunConfig, hf_config: Mapping[str, Any], steps: list[dict[str, Any]]) -> Plan:
    cluster = config.cluster
    device = "cpu" if Platform.detect().kind == "cpu" else cluster.device
    each = cluster.devices_per_node or cluster.procs_per_node
    lengths = [
        mean(values) if (values := [line[name] for line in steps if line.get(name)]) else None
        for name in ("prompt_length/mean", "response_length/mean")
    ]
    machines = read_cluster(None, cluster.nodes, each, device)
    # a run on CPUs keeps its pools regardless of the recipe's planned device
    return make_plan(replace(job_of(config, machines, Assumed(*lengths), hf_config), placed=None))


def _engines(plan: Plan, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the planned and measured bytes of weights per engine rank. The measured value is the
    number of bytes written by all ranks in a sync, counting each element once."""
    written = [line["sync/bytes"] for line in steps if line.get("sync/bytes")]
    if not written:
        return {}
    return {
        "rollout": {
            "weights": _pair(plan.job.engine.weights, max(written) / plan.job.engine_devices)
        }
    }


def _most(ranks: list[Mapping[str, int]]) -> dict[str, int]:
    """Return the bytes of each part on the rank with the largest total."""
    largest = max(ranks, key=lambda parts: sum(parts.values()))
    return dict(largest)


def _pair(planned: float, measured: float | None) -> dict[str, float | None]:
    return {"planned": planned, "measured": measured}
