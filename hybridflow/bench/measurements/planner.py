"""The weight-sync planner."""

from __future__ import annotations

from hybridflow.bench.measurements.base import PROCESSES, Place, Yields, measurement
from hybridflow.bench.result import measured
from hybridflow.bench.rounds import Timed, loops


@measurement("planner", "micro", processes=PROCESSES, rounds=3, cpu_time=True)
def planner(place: Place) -> Yields:
    """a transfer plan for Qwen3-30B-A3B from 16 ranks to 8: seconds to plan, verify and simulate,
    number of slices, evenness across links"""
    from hybridflow.models.layout import ParallelShape
    from hybridflow.reshard import report
    from hybridflow.reshard.engine_layouts import EngineShape
    from hybridflow.reshard.simulate import Fabric

    config = report.read_config("qwen3-30b-a3b")
    trainer = report.build(ParallelShape, "ranks=16,tp=2,ep=8")
    engine = report.build(EngineShape, "4xtp=2")

    def plan() -> report.DryRun:
        return report.dry_run(config, trainer, [engine], "bfloat16", 1 << 30, Fabric())

    yield Timed({"planner/plan and proof": plan}, yardstick=loops(20), bound=0.1)
    figures = plan().figures()
    yield measured("planner/slices", "count", figures["slices"], "lower")
    yield measured(
        "planner/hottest link over its bound",
        "count",
        figures["hottest_link_ratio"],
        "lower",
        limit=("an even share", 1.0),
        bound=0.01,
    )
