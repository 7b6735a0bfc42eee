"""Measures the speed of a node's local disk and of the folder shared by all nodes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.rounds import Call, Side, Timed

BYTES = 32 << 20
FILES = 20


@measurement("disk", "preflight", per_node=True, rounds=9)
def disk(place: Place) -> Yields:
    """writes with fsync, and writes of small files, on the node's local disk and in the shared
    folder"""
    data = os.urandom(BYTES)
    shared = place.folder / "disk" / (place.node or "node")
    shared.mkdir(parents=True, exist_ok=True)
    # anonymous, because a killed process would leave a name in /dev/shm behind
    in_memory = Path(f"/proc/self/fd/{os.memfd_create('hybridflow-bench')}")
    memory_write = Side("the same write to memory", partial(write, in_memory, data))
    writes: dict[str, Call] = {}
    small: dict[str, Call] = {}
    for name, folder in (("local disk", place.local), ("shared folder", shared)):
        writes[f"{name}/write"] = partial(write, folder / "large", data)
        small[f"{name}/{FILES} small files"] = partial(_small, folder)
    try:
        yield Timed(writes, memory_write, amount=BYTES / 1e9, unit="GB/s", bound=0.25)
        yield Timed(small, yardstick=memory_write, bound=0.25)
    finally:
        for path in shared.iterdir():
            path.unlink(missing_ok=True)


def write(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
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
