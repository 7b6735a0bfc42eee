"""A plan for 10^12 parameters is made and proven in seconds, and balanced."""

from __future__ import annotations

import time

import pytest

from hybridflow.models.fp8 import FP8
from hybridflow.models.layout import ParallelShape
from hybridflow.models.published import published
from hybridflow.reshard import report
from hybridflow.reshard.engine_layouts import EngineShape
from hybridflow.reshard.simulate import Fabric

pytestmark = pytest.mark.slow  # plans of the largest published models


@pytest.mark.parametrize(
    ("model", "trainer", "engines", "dtype"),
    [
        ("kimi-k2", "ranks=2048,tp=8,pp=16,ep=32,first=3,last=2", "32xtp=32,ep=32", None),
        ("deepseek-v3", "ranks=256,tp=8,pp=8,ep=32,layers=7+8+8+8+8+8+8+6", "tp=32,ep=32", None),
        ("deepseek-v3", "ranks=256,tp=8,pp=8,ep=32,first=7,last=6", "tp=32,ep=32,dense=1", FP8),
    ],
)
def test_published_sizes(model: str, trainer: str, engines: str, dtype: str | None) -> None:
    before = time.process_time()
    shapes = report.build(ParallelShape, trainer), [report.build(EngineShape, engines)]
    run = report.dry_run(published(model), *shapes, "bfloat16", 1 << 30, Fabric(), dtype)
    assert time.process_time() - before < 10
    figures = run.figures()
    assert figures["hottest_link_ratio"] <= 1.05
    assert figures["wire_share"] >= 0.8
    assert max(figures["sender_staging_bytes"], figures["receiver_staging_bytes"]) <= 1 << 30
    assert figures["unused"] == []
