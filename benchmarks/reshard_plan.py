"""Plans of weight syncs of published sizes: planning, evenness of the links, predicted time.

Predictions are of a model of the network, published times were measured: compare with care.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.support.published import sync_seconds

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.result import Metric, Reference, single
from hybridflow.models.fp8 import FP8
from hybridflow.reshard import report
from hybridflow.reshard.engine_layouts import EngineShape
from hybridflow.reshard.layout import ParallelShape
from hybridflow.reshard.simulate import Fabric

STAGING = 1 << 30


@dataclass(frozen=True)
class Case:
    """One sync; `published` is the system in published.yaml that measured the same model."""

    name: str
    model: str
    trainer: str
    engine: str
    engine_dtype: str | None = None
    published: str | None = None


K2 = "ranks=2048,tp=8,pp=16,ep=32,first=3,last=2"
V3 = "ranks=256,tp=8,pp=8,ep=32,first=7,last=6"
Q3 = "ranks=128,tp=4,pp=2,ep=16"
CASES = (
    Case("kimi-k2 2048 to 1024", "kimi-k2", K2, "32xtp=32,ep=32"),
    Case("kimi-k2 2048 to 1024, attention by data", "kimi-k2", K2, "32xtp=32,ep=32,dpa=32"),
    Case("kimi-k2 2048 to 1024, fp8", "kimi-k2", K2, "32xtp=32,ep=32,dense=1", FP8),
    Case("kimi-k2 256 to 128", "kimi-k2", V3, "4xtp=32,ep=32"),
    Case("kimi-k2 256 to 128, fp8", "kimi-k2", V3, "4xtp=32,ep=32,dense=1", FP8, "Perplexity"),
    Case("deepseek-v3 256 to 32", "deepseek-v3", V3, "tp=32,ep=32", None, "NeMo-RL nccl_reshard"),
    Case("deepseek-v3 256 to 32, fp8", "deepseek-v3", V3, "tp=32,ep=32,dense=1", FP8),
    Case("qwen3-235b 128 to 64", "qwen3-235b-a22b", Q3, "8xtp=8,ep=8", None, "miles"),
    Case("qwen3-30b 32 to 32", "qwen3-30b-a3b", "ranks=32,tp=4,ep=8", "16xtp=2", None, "miles"),
)


@measurement("reshard_plan", timeout_s=900)
def reshard_plan(place: Place, case: str = "") -> Iterator[Metric]:
    """plans of published models: seconds, memory, evenness of links, predicted beside published
    time"""
    for one in CASES:
        if case in one.name:
            # an own process, so that the peak of memory is the case's
            with multiprocessing.get_context("fork").Pool(1) as pool:
                figures = pool.apply(_measure, (one,))
            yield from _metrics(one, figures)


def _measure(case: Case) -> dict[str, Any]:
    trainer = report.build(ParallelShape, case.trainer)
    engine = report.build(EngineShape, case.engine)
    config = report.read_config(case.model)
    run = report.dry_run(
        config, trainer, [engine], "bfloat16", STAGING, Fabric(), case.engine_dtype
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = run.figures()
    return {**figures, "cpu_s": used.ru_utime + used.ru_stime, "peak_kib": used.ru_maxrss}


def _metrics(case: Case, figures: dict[str, Any]) -> Iterator[Metric]:
    name = case.name
    yield single(f"{name}: planning", "s", figures["plan_s"])
    yield single(f"{name}: planning, proof and simulation, CPU", "s", figures["cpu_s"])
    yield single(f"{name}: peak memory", "GB", figures["peak_kib"] * 1024 / 1e9)
    yield single(f"{name}: slices", "count", figures["slices"], "lower")
    even = Reference("an even share", (float(figures["hottest_link_bound_bytes"]),))
    hottest = figures["hottest_link_bytes"]
    yield single(f"{name}: hottest link, bytes", "count", hottest, "lower", limit=even)
    largest = max(figures["sender_staging_bytes"], figures["receiver_staging_bytes"])
    most = Reference("configured", (float(STAGING),))
    yield single(f"{name}: peak staging, bytes", "count", largest, "lower", limit=most)
    wire = Reference("the busiest link", (figures["wire_bound_s"],))
    measured = None
    if case.published:
        seconds = sync_seconds(case.published, case.model)
        measured = Reference(f"{case.published}, measured", (seconds,))
    predicted = figures["seconds"]
    yield single(f"{name}: predicted", "s", predicted, "lower", limit=wire, peer=measured)
