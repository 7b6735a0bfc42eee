"""Plan weight syncs of published sizes: seconds and memory of planning, evenness of the links, predicted time beside
published ones.

`make bench NAME=reshard_plan`; `ARGS=kimi` runs the cases whose name contains it and writes nothing. Each case runs in
a process of its own, so that its peak memory is its own. Predictions are of a model of the network, published figures
were measured: compare with care.
"""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import dataclasses
import multiprocessing
import resource
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.models.fp8 import FP8
from hybridflow.reshard import report as dry
from hybridflow.reshard.engine_layouts import EngineShape
from hybridflow.reshard.layout import ParallelShape
from hybridflow.reshard.simulate import Fabric, simulate
from support.report import Figure, write

STAGING = 1 << 30


@dataclass(frozen=True)
class Case:
    """One sync: a published model, both sides' sizes, and a published time for the same model where there is one."""

    name: str
    model: str
    trainer: str
    engines: tuple[str, ...]
    peer: str | None = None
    peer_seconds: float | None = None
    engine_dtype: str | None = None


K2_TRAINER = "ranks=2048,tp=8,pp=16,ep=32,first=3,last=2"
V3_TRAINER = "ranks=256,tp=8,pp=8,ep=32,first=7,last=6"
CASES = (
    Case("kimi-k2 2048 to 1024", "kimi-k2", K2_TRAINER, ("32xtp=32,ep=32",)),
    Case("kimi-k2 2048 to 1024, attention by data", "kimi-k2", K2_TRAINER, ("32xtp=32,ep=32,dpa=32",)),
    Case("kimi-k2 2048 to 1024, fp8", "kimi-k2", K2_TRAINER, ("32xtp=32,ep=32,dense=1",), engine_dtype=FP8),
    Case("kimi-k2 256 to 128", "kimi-k2", V3_TRAINER, ("4xtp=32,ep=32",)),
    Case("kimi-k2 256 to 128, fp8", "kimi-k2", V3_TRAINER, ("4xtp=32,ep=32,dense=1",), "Perplexity", 1.3, FP8),
    Case("deepseek-v3 256 to 32", "deepseek-v3", V3_TRAINER, ("tp=32,ep=32",), "NeMo-RL nccl_reshard (FFN only)", 2.39),
    Case("deepseek-v3 256 to 32, fp8", "deepseek-v3", V3_TRAINER, ("tp=32,ep=32,dense=1",), engine_dtype=FP8),
    Case("qwen3-235b 128 to 64", "qwen3-235b-a22b", "ranks=128,tp=4,pp=2,ep=16", ("8xtp=8,ep=8",), "miles", 3.16),
    Case("qwen3-30b 32 to 32", "qwen3-30b-a3b", "ranks=32,tp=4,ep=8", ("16xtp=2",), "miles", 2.16),
)


def measure(case: Case) -> dict[str, Any]:
    """Figures of one case; for comparison, the same plan with all receivers beginning at the first layer."""
    trainer, engines = dry.build(ParallelShape, case.trainer), [dry.build(EngineShape, text) for text in case.engines]
    before = resource.getrusage(resource.RUSAGE_SELF)
    run = dry.dry_run(dry.read_config(case.model), trainer, engines, "bfloat16", STAGING, Fabric(), case.engine_dtype)
    after = resource.getrusage(resource.RUSAGE_SELF)
    in_step = dataclasses.replace(run.plan, phase=np.zeros_like(run.plan.phase))
    return run.figures() | {
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_bytes": after.ru_maxrss * 1024,
        "in_step_s": simulate(in_step, Fabric()).seconds,
    }


def figures(case: Case, f: dict[str, Any]) -> list[Figure]:
    """The measurements in the benchmarks' common form."""
    name, staging = case.name, max(f["sender_staging_bytes"], f["receiver_staging_bytes"])
    ratio = case.peer_seconds / f["seconds"] if case.peer_seconds else None
    return [
        Figure(f"{name}: planning", f["plan_s"], "s"),
        Figure(f"{name}: planning, proof and simulation, CPU", f["cpu_s"], "s"),
        Figure(f"{name}: peak memory", f["peak_bytes"], "bytes"),
        Figure(f"{name}: slices", f["slices"], "slices"),
        Figure(f"{name}: wire", f["wire_bytes"], "bytes"),
        Figure(
            f"{name}: hottest link",
            f["hottest_link_bytes"],
            "bytes",
            limit=f["hottest_link_bound_bytes"],
            share=1 / f["hottest_link_ratio"],
        ),
        Figure(f"{name}: peak staging", staging, "bytes", limit=STAGING, share=staging / STAGING),
        Figure(
            f"{name}: predicted",
            f["seconds"],
            "s",
            case.peer,
            case.peer_seconds,
            ratio,
            f["wire_bound_s"],
            f["wire_share"],
        ),
        Figure(
            f"{name}: predicted, in step",
            f["in_step_s"],
            "s",
            limit=f["wire_bound_s"],
            share=f["wire_bound_s"] / f["in_step_s"],
        ),
    ]


def main() -> None:
    """Run the cases; with all of them, write the results."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    found: list[Figure] = []
    for case in CASES:
        if wanted in case.name:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found += figures(case, pool.apply(measure, (case,)))
    if wanted:
        for figure in found:
            print(f"{figure.metric:<58} {figure.value:,} {figure.unit}  share {figure.share}")
    else:
        write(
            "reshard_plan",
            found,
            {
                "link_gbps": Fabric().link_gbps,
                "staging_bytes": STAGING,
                "cases": {c.name: [c.trainer, *c.engines] for c in CASES},
            },
        )


if __name__ == "__main__":
    main()
