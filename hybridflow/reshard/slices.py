"""The slice plan: for every rectangle that an engine needs, the trainer rank that sends it, and when.

The pieces of both sides are intersected; each element that an engine rank needs is delivered to it once. Among the
ranks that hold the same region (data-parallel replicas) the work is shared so that the busiest link is as idle as it
can be. A slice that several engine ranks need is one row with several receivers: packed once, sent to each (multicast).
The plan is plain data: columns of integers, a hash, JSON. Nothing here knows Megatron, SGLang or processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.reshard.layout import ITEM_BYTES, PADDING, Catalog, Layout, columns_of

VERSION = 2
Array = np.ndarray


@dataclass(frozen=True)
class Deliveries:
    """One row a slice and class of receiving ranks, in the order in which a receiver takes them.

    Attributes:
        receiver: `[N]` class of the target ranks; all ranks of the class receive the row.
        piece: `[N]` row of the class's pieces. region: `[N]` row of `Regions`: the source rectangle that it is cut
            from.
        start, size: `[N, 3]` the slice, in the HF tensor.
        nbytes: `[N]` on the wire, in the target's dtype. bucket: `[N]` number of the receiver's bucket.
        slice_id: `[N]` equal for rows that carry the same elements of the same source region: packed once.
    """

    receiver: Array
    piece: Array
    region: Array
    start: Array
    size: Array
    nbytes: Array
    bucket: Array
    slice_id: Array


@dataclass(frozen=True)
class Regions:
    """Distinct rectangles of the source side and who holds them: `holders[offsets[i]:offsets[i+1]]` are classes of
    source ranks."""

    tensor: Array
    start: Array
    size: Array
    offsets: Array
    holders: Array


@dataclass(frozen=True)
class Sends:
    """Who sends which delivery to which of its receivers: `receivers_of(class)[first:last]` get row `delivery` from
    rank `source`."""

    delivery: Array
    source: Array
    first: Array
    last: Array


@dataclass(frozen=True)
class SlicePlan:
    """The whole plan. `phase[r]` is the bucket with which engine rank r begins; it goes on in order and wraps
    around."""

    catalog: Catalog
    source: Layout
    target: Layout
    regions: Regions
    deliveries: Deliveries
    sends: Sends
    phase: Array
    bucket_bytes: int
    conversions: tuple[tuple[str, str], ...]

    def receivers(self, receiver_class: int) -> Array:
        """Engine ranks of a class, in the order that `Sends` counts them."""
        return np.flatnonzero(self.target.rank_class == receiver_class)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the plan's hash."""
        tables = {name: columns_of(getattr(self, name)) for name in ("regions", "deliveries", "sends")}
        return {
            "version": VERSION,
            "hash": self.digest(),
            "catalog": columns_of(self.catalog),
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            **tables,
            "phase": self.phase.tolist(),
            "bucket_bytes": self.bucket_bytes,
            "conversions": [list(pair) for pair in self.conversions],
        }

    def digest(self) -> str:
        """sha256 over all columns, the same on every machine: both ends compare it before a byte moves."""
        digest = hashlib.sha256(json.dumps([VERSION, self.bucket_bytes, self.catalog.names, self.conversions]).encode())
        layouts = (self.source, self.target)
        parts: list[Any] = [self.catalog, self.regions, self.deliveries, self.sends, *layouts]
        parts += [rank for layout in layouts for rank in layout.classes]
        for part in parts:
            for name, value in sorted(vars(part).items()):
                if isinstance(value, np.ndarray):
                    digest.update(f"{name}{value.shape}".encode())
                    digest.update(np.ascontiguousarray(value, dtype="<i8").tobytes())
                elif name in ("names", "dtypes"):
                    digest.update(json.dumps(value).encode())
        digest.update(np.ascontiguousarray(self.phase, dtype="<i8").tobytes())
        return digest.hexdigest()


def piece_columns(layout: Layout) -> dict[str, Array]:
    """All real pieces of all classes in one table: class, row, tensor, start, size, buffer, local; padding left out."""

    counts = [len(rank.tensor) for rank in layout.classes]
    table = {"class": np.repeat(np.arange(len(counts)), counts), "row": np.concatenate([*map(np.arange, counts)])}
    for name in ("tensor", "start", "size", "buffer", "local"):
        table[name] = np.concatenate([getattr(rank, name) for rank in layout.classes])
    real = table["tensor"] != PADDING
    return {name: values[real] for name, values in table.items()}


def buffer_item_bytes(layout: Layout, table: Mapping[str, Array]) -> Array:
    """Bytes of an element of the buffer that each row of `piece_columns` lies in.

    Raises:
        WeightSyncError: a dtype that the plan does not know.
    """
    unknown = sorted({dtype for rank in layout.classes for dtype in rank.dtypes} - ITEM_BYTES.keys())
    if unknown:
        raise WeightSyncError(f"no conversion to {', '.join(unknown)} is known; known dtypes: {', '.join(ITEM_BYTES)}")
    counts = [len(rank.names) for rank in layout.classes]
    sizes = np.array([ITEM_BYTES[dtype] for rank in layout.classes for dtype in rank.dtypes], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    return sizes[first[table["class"]] + table["buffer"]]
