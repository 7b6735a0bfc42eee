"""What a stage leader announces to the engines before weights flow. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.engines.weights_group import Bucket


@dataclass(frozen=True)
class WeightsOffer:
    """One stage leader's announcement: group name, where it listens, and the buckets it sends, in order."""

    stage: int
    group: str
    host: str
    port: int
    world_size: int
    backend: str
    buckets: tuple[Bucket, ...]
