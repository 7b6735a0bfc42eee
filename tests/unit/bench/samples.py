"""Simulated runs of a suite on a machine that others share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hybridflow.bench.result import Metric, Reference, Result, fingerprint_of

METRICS = 5
ROUNDS = 25
HARDWARE = {"cores": 2, "memory_gib": 24.0, "accelerators": []}


def simulated(
    seed: int,
    nodes: Sequence[str] = ("",),
    slow: Mapping[tuple[str, str], float] | None = None,
    noise: float = 0.05,
) -> Result:
    """One run on a machine whose speed wanders by a third.

    All that is measured in a round shares that factor. Every value has noise in addition, and one
    round of ten takes half as much time again.

    Args:
        seed: of the run.
        nodes: each has all metrics.
        slow: (node, metric) -> factor of its time.
        noise: standard deviation of the logarithm.
    """
    random = np.random.default_rng(seed)
    weather = np.exp(np.cumsum(random.normal(0, 0.08, ROUNDS)).clip(-0.33, 0.33))
    metrics = []
    for node in nodes:
        for number in range(METRICS):
            name = f"room{number}/seconds"
            base = 0.01 * (number + 1) * (slow or {}).get((node, name), 1.0)
            values, limits = (np.exp(random.normal(0, noise, ROUNDS)) for _ in range(2))
            values *= np.where(random.random(ROUNDS) < 0.1, 1.5, 1.0)
            limit = Reference("copy", tuple((0.004 * weather * limits).tolist()))
            metrics.append(
                Metric(
                    "simulated",
                    name,
                    "s",
                    "lower",
                    tuple((base * weather * values).tolist()),
                    limit,
                    node=node,
                )
            )
    print_of = fingerprint_of({**HARDWARE, "git": None}, nodes=[node for node in nodes if node])
    return Result("micro", "2026-01-01T00:00:00Z", 1.0, print_of, tuple(metrics))
