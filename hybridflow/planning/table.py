"""Formats a plan as a text table, with the change that would make it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.planning.job import Job
from hybridflow.planning.plan import Plan

GB = 1e9


def table(plan: Plan, name: str, change: Mapping[str, Any] | None = None) -> str:
    """Format the whole plan as text.

    Args:
        change: settings that make the job fit if it does not; None if none are known.
    """
    job = plan.job
    lines = [
        (
            f"{name}: {plan.figures()['parameters'] / 1e9:,.1f} billion parameters on "
            f"{job.machines.nodes} nodes of {job.machines.devices_per_node} {job.machines.name} "
            f"({job.devices} devices used)"
        ),
        *_layouts(job),
        *_pools(job),
        (
            f"batch       {job.prompts} prompts x {job.samples // job.prompts} = {job.samples} "
            f"samples, mean {job.mean_tokens:,.0f} tokens (assumed: prompt "
            f"{job.prompt_tokens:,.0f}, response {job.lengths.mean:,.0f} of at most "
            f"{job.lengths.longest:,}), {job.actor.updates} updates"
        ),
        f"KV cache    {job.engine.kv_room:,.0f} tokens per engine",
        "",
        *_phases(plan),
        "",
        (
            f"step        {plan.seconds:,.1f} s, mostly {plan.bottleneck.name}; "
            f"{plan.device_hours:.2f} device hours, {plan.tokens_per_second:,.0f} tokens/s per "
            "device"
        ),
        (
            f"memory      peak {plan.peak.peak / GB:.1f} of {plan.limit / GB:.0f} GB "
            f"({plan.peak.name}); host {plan.host_bytes / GB:.0f} of "
            f"{job.machines.host_memory_gb:.0f} GB per node"
        ),
        *_verdict(plan, change),
    ]
    return "\n".join(map(str.rstrip, lines))


def _layouts(job: Job) -> list[str]:
    cut = job.actor.training.cut
    engine = job.engine.shape
    names = ("TP", "PP", "VPP", "CP", "EP", "DP")
    sizes = (cut.tensor, cut.pipeline, cut.virtual_pipeline, cut.context, cut.expert, cut.data)
    larger = []
    for name, size in zip(names, sizes, strict=True):
        if size > 1:
            larger.append(f"{name} {size}")
    pipeline = f", PP {engine.pipeline}" if engine.pipeline > 1 else ""
    expert = f", EP {engine.expert}" if engine.expert > 1 else ""
    devices = "sharing the trainer's devices" if job.shares else "on separate devices"
    return [
        f"trainer     {cut.ranks} ranks: {' · '.join(larger) or 'one'}",
        f"engines     {job.engines} of TP {engine.tensor}{pipeline}{expert}, {devices}",
    ]


def _phases(plan: Plan) -> list[str]:
    rows = []
    for phase in plan.phases:
        name = phase.name
        if phase.pool != "trainer" and not plan.job.shares:
            name += " (engines)"
        seconds = f"{phase.seconds:,.1f}"
        share = f"{100 * phase.seconds / plan.seconds:.0f}%"
        peak = f"{phase.peak / GB:.1f}" if phase.memory else ""
        largest = sorted(phase.memory.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{part} {size / GB:.1f}" for part, size in largest)
        rows.append((name, seconds, share, peak, parts))
    return _grid(("phase", "seconds", "share", "peak GB", "largest parts"), rows)


def _pools(job: Job) -> list[str]:
    """Return a line that lists the device pools, or an empty string if all roles share one pool."""
    members: dict[str, list[str]] = {}
    for role in job.roles:
        members.setdefault(role.pool, []).append(role.name.replace("_", " "))
    if len(members) == 1:
        return []
    members.setdefault(job.engine_pool, []).append("engines")
    found = []
    for pool, names in members.items():
        listed = ", ".join(names)
        found.append(f"{listed} on {job.pools[pool]}")
    pools = " | ".join(found)
    return [f"pools       {pools} devices, running concurrently"]


def _verdict(plan: Plan, change: Mapping[str, Any] | None) -> list[str]:
    if plan.fits:
        return ["fits"]
    found = [f"does not fit: {line}" for line in plan.problems]
    if change is None:
        found.append("none of the changes that the planner tries, alone or in pairs, makes it fit")
    else:
        settings = " ".join(f"{key}={_text(value)}" for key, value in change.items())
        found.append(f"fits with: {settings}")
    return found


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    lines: list[str] = []
    for row in (head, *rows):
        cells = list(map(str.rjust, row, widths))
        cells[0] = row[0].ljust(widths[0])
        cells[-1] = row[-1].ljust(widths[-1])
        lines.append("  ".join(cells))
    return lines


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)
