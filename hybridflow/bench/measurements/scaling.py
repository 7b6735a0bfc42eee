"""The same steps with more processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.measurements.steps import train
from hybridflow.bench.result import Metric, NotRun
from hybridflow.errors import ResourceError

_COMMON = ["cluster=one-process", "actor=tiny", "rollout=tiny"]


@measurement("scaling", "scale", timeout_s=540)
def scaling(place: Place) -> Iterator[Metric | NotRun]:
    """the tiny recipe's steps with 1, 2, ... data-parallel ranks, up to the cores: tokens a second and efficiency"""
    import os

    alone = None
    ranks, cores = 1, len(os.sched_getaffinity(0))
    while ranks <= cores:
        try:
            words = [*_COMMON, f"cluster.procs_per_node={ranks}", f"rollout.num_engines={ranks}", f"name=ranks{ranks}"]
            records, _ = train(place, words)
        except ResourceError as error:
            yield NotRun(f"scaling to {ranks}", str(error))
            return
        rate = tuple(float(record["perf/throughput"]) for record in records[1:])
        alone = alone or statistics.median(rate)
        yield Metric("scaling", f"scale/{ranks} ranks", "tokens/s", "none", rate)
        efficiency = statistics.median(rate) / alone / ranks
        yield Metric("scaling", f"scale/efficiency of {ranks} ranks", "of one rank", "none", (efficiency,))
        ranks *= 2
