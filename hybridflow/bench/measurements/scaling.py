"""Measures how steps scale with the number of processes."""

from __future__ import annotations

import os
import statistics

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.measurements.steps import tokens_per_second, train_recipe
from hybridflow.bench.result import NotRun, measured
from hybridflow.errors import ResourceError

MOST_CONTROLLED = (
    0.05  # maximum share of a step in which neither workers nor engines work
)


@measurement("scaling", "scale", timeout_s=540)
def scaling(place: Place) -> Yields:
    """steps of the tiny recipe with 1, 2, ... data-parallel ranks, up to the number of cores:
    tokens per second, efficiency, and the controller's share of the time"""
    alone = None
    ranks = 1
    while ranks <= len(os.sched_getaffinity(0)):
        words = [
            "cluster=one-process",
            "actor=tiny",
            "rollout=tiny",
            f"cluster.procs_per_node={ranks}",
            f"rollout.num_engines={ranks}",
        ]
        try:
            records, _ = train_recipe(place, f"ranks{ranks}", words)
        except ResourceError as error:
            yield NotRun(f"scaling to {ranks}", str(error))
            return
        rate = list(map(tokens_per_second, records[1:]))
        alone = alone or statistics.median(rate)
        yield measured(f"scale/{ranks} ranks", "tokens/s", rate)
        efficiency = statistics.median(rate) / alone / ranks
        yield measured(f"scale/efficiency of {ranks} ranks", "of one rank", efficiency)
        shares = [float(record["controller/share"]) for record in records[1:]]
        yield measured(
            f"scale/controller with {ranks} ranks",
            "of a step",
            shares,
            "lower",
            limit=("aim", MOST_CONTROLLED),
            bound=0.5,
        )
        ranks *= 2
