"""The planner of weight syncs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hybridflow.bench.measurements.base import PROCESSES, ROUNDS_EACH, Place, interleaved, loop, measurement
from hybridflow.bench.result import Metric, Reference


@measurement("planner", "micro", processes=PROCESSES)
def planner(place: Place) -> Iterator[Metric]:
    """a plan of Qwen3-30B-A3B from 16 ranks to 8: seconds to plan, prove and simulate, slices, evenness of links"""
    from hybridflow.reshard import report
    from hybridflow.reshard.engine_layouts import EngineShape
    from hybridflow.reshard.layout import ParallelShape
    from hybridflow.reshard.simulate import Fabric

    config = report.read_config("qwen3-30b-a3b")
    trainer, engine = report.build(ParallelShape, "ranks=16,tp=2,ep=8"), report.build(EngineShape, "4xtp=2")
    runs = []

    def plan() -> None:
        runs.append(report.dry_run(config, trainer, [engine], "bfloat16", 1 << 30, Fabric()))

    found = interleaved(
        {"plan": plan, "loop": lambda: [loop() for _ in range(20)]}, rounds=ROUNDS_EACH // 3, clock=time.process_time
    )
    loops = Reference("Python's own loop", tuple(found["loop"]))
    yield Metric("planner", "planner/plan and proof", "s", "lower", tuple(found["plan"]), yardstick=loops, bound=0.1)
    figures = runs[-1].figures()
    yield Metric("planner", "planner/slices", "count", "lower", (float(figures["slices"]),))
    even = Reference("an even share", (1.0,))
    link = float(figures["hottest_link_ratio"])
    yield Metric("planner", "planner/hottest link over its bound", "count", "lower", (link,), even, bound=0.01)
