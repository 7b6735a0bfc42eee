"""Measures weight-sync plans for published model sizes: planning time, evenness across links,
predicted time.

Predictions come from a network model whereas published times were measured, so compare them with
care.
"""

from __future__ import annotations

import multiprocessing
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from benchmarks.support.published import sync_seconds

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.result import measured
from hybridflow.models.layout import ParallelShape
from hybridflow.reshard import report
from hybridflow.reshard.engine_layouts import EngineShape
from hybridflow.reshard.simulate import Fabric

STAGING = 1 << 30


@dataclass(frozen=True)
class Case:
    """A weight sync. `published` names the system in published.yaml that was measured with the same
    model."""

    name: str
    model: str
    trainer: str
    engine: str
    engine_dtype: str | None = None
    published: str | None = None


CASES = []
for fields in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")):
    CASES.append(Case(**fields))


@measurement("reshard_plan", timeout_s=900)
def reshard_plan(place: Place, case: str = "") -> Yields:
    """plans for published models: seconds, memory, evenness across links, predicted time compared
    with published time"""
    for one in CASES:
        if case in one.name:
            # a separate process, to measure the case's own peak memory
            with multiprocessing.get_context("fork").Pool(1) as pool:
                figures = pool.apply(_measure, (one,))
            yield from _metrics(one, figures)


def _measure(case: Case) -> dict[str, Any]:
    """Compute the figures of a case in this process."""
    trainer = report.build(ParallelShape, case.trainer)
    engine = report.build(EngineShape, case.engine)
    config = report.read_config(case.model)
    run = report.dry_run(
        config, trainer, [engine], "bfloat16", STAGING, Fabric(), case.engine_dtype
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = run.figures()
    figures["cpu_s"] = used.ru_utime + used.ru_stime
    figures["peak_gb"] = used.ru_maxrss * 1024 / 1e9
    return figures


def _metrics(case: Case, figures: dict[str, Any]) -> Yields:
    wire = ("the busiest link", figures["wire_bound_s"])
    even = ("an even share", figures["hottest_link_bound_bytes"])
    published = None
    if case.published:
        seconds = sync_seconds(case.published, case.model)
        published = (f"{case.published}, measured", seconds)
    for quantity, unit, key, references in (
        ("planning", "s", "plan_s", {}),
        ("planning, proof and simulation, CPU", "s", "cpu_s", {}),
        ("peak memory", "GB", "peak_gb", {}),
        ("slices", "count", "slices", {}),
        ("hottest link, bytes", "count", "hottest_link_bytes", {"limit": even}),
        ("sender's staging, bytes", "count", "sender_staging_bytes", {}),
        ("predicted", "s", "seconds", {"limit": wire, "peer": published}),
    ):
        yield measured(
            f"{case.name}: {quantity}", unit, figures[key], "lower", **references
        )
