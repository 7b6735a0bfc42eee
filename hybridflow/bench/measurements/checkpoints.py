"""Measures writing, syncing and hashing of checkpoint files."""

from __future__ import annotations

import os
from functools import partial

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.measurements.disk import write
from hybridflow.bench.rounds import Side, Timed

BYTES = 32 << 20


@measurement("checkpoints", "micro", rounds=15)
def checkpoints(place: Place) -> Yields:
    """saving, syncing and hashing of a 32 MiB safetensors file, compared with a plain write and
    fsync"""
    import torch
    from safetensors.torch import save_file

    from hybridflow.saving.manifest import digest_of

    tensors = {f"t{number}": torch.randn(BYTES // 32) for number in range(8)}
    saved = place.local / "saved.safetensors"

    def save() -> None:
        save_file(tensors, saved)
        with saved.open("rb") as stream:
            os.fsync(stream.fileno())
        digest_of(saved)

    plain = partial(write, place.local / "plain", os.urandom(BYTES))
    limit = Side("a plain write and fsync", plain)
    calls = {"checkpoints/save and hash": save}
    yield Timed(calls, limit, amount=BYTES / 1e9, unit="GB/s", bound=0.25)
