"""Disks: the node's own and the folder that all nodes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hybridflow.bench.measurements.base import Place, interleaved, measurement, rates
from hybridflow.bench.result import Metric, Reference

BYTES = 32 << 20
FILES = 20


@measurement("disk", "preflight", per_node=True)
def disk(place: Place) -> Iterator[Metric]:
    """writing with fsync, and small files, on the node's own disk and in the shared folder"""
    data = os.urandom(BYTES)
    shared = place.folder / "disk" / (place.node or "node")
    shared.mkdir(parents=True, exist_ok=True)
    sides = {}
    for name, folder in (("local disk", place.local), ("shared folder", shared)):
        sides[f"{name}/write"] = lambda folder=folder: _write(folder / "large", data)
        sides[f"{name}/{FILES} small files"] = lambda folder=folder: _small(folder)
    memory = Path("/dev/shm")
    reference = memory / f"hybridflow-bench-{os.getpid()}" if os.access(memory, os.W_OK) else place.local / "reference"
    try:
        found = interleaved({**sides, "reference": lambda: _write(reference, data)}, rounds=9)
    finally:
        for path in (reference, *shared.iterdir()):
            path.unlink(missing_ok=True)
    limits = rates(BYTES / 1e9, found["reference"])
    for name, seconds in found.items():
        if name.endswith("/write"):
            rate = rates(BYTES / 1e9, seconds)
            limit = Reference("the same write to memory", limits)
            yield Metric("disk", name, "GB/s", "higher", rate, limit, bound=0.25)
        elif name != "reference":
            write = Reference("a large write", tuple(found[f"{name.partition('/')[0]}/write"]))
            yield Metric("disk", name, "s", "lower", tuple(seconds), yardstick=write, bound=0.25)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as stream:
        stream.write(data)
        os.fsync(stream.fileno())


def _small(folder: Path) -> None:
    for number in range(FILES):
        path = folder / f"small{number}"
        path.write_bytes(b"x" * 1000)
        path.rename(folder / "renamed")
        (folder / "renamed").read_bytes()
        (folder / "renamed").unlink()
