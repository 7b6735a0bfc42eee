"""Files of a checkpoint: written, synchronized and hashed."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hybridflow.bench.measurements.base import Place, interleaved, measurement, rates
from hybridflow.bench.result import Metric, Reference

BYTES = 32 << 20


@measurement("checkpoints", "micro")
def checkpoints(place: Place) -> Iterator[Metric]:
    """a safetensors file of 32 MiB, saved, synchronized and hashed, beside a plain write and fsync"""
    import torch
    from safetensors.torch import save_file

    from hybridflow.saving.manifest import digest_of

    tensors = {f"t{number}": torch.randn(BYTES // 32) for number in range(8)}
    data = os.urandom(BYTES)

    def save() -> None:
        path = place.local / "saved.safetensors"
        save_file(tensors, path)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        digest_of(path)

    def plain() -> None:
        with (place.local / "plain").open("wb", buffering=0) as stream:
            stream.write(data)
            os.fsync(stream.fileno())

    found = interleaved({"save": save, "plain": plain}, rounds=15)
    limit = Reference("a plain write and fsync", rates(BYTES / 1e9, found["plain"]))
    yield Metric("checkpoints", "checkpoints/save and hash", "GB/s", "higher", rates(BYTES / 1e9, found["save"]), limit,
                 bound=0.25)  # fmt: skip
