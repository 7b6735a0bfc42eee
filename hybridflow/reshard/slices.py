"""The slice plan: the sender and the delivery order of every rectangle that an engine needs.

The plan intersects the pieces of both sides, so that each element that an engine rank needs is
delivered to it exactly once. Ranks that hold the same region (data-parallel replicas) split the
work of sending it, so that the busiest link carries as little as possible. A slice needed by
several engine ranks is one row with several receivers (multicast).

The plan is plain data: integer columns, a hash, JSON. This module does not depend on Megatron,
SGLang or processes.
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
    """One row per (slice, class of receiving ranks), in the order in which a receiver processes
    them.

    Attributes:
        receiver: `[N]` class of the target ranks; all ranks of the class receive the row.
        piece: `[N]` index into the class's pieces.
        region: `[N]` index into `Regions` of the source rectangle that contains the slice.
        start, size: `[N, 3]` the slice, in coordinates of the HF tensor.
        nbytes: `[N]` bytes on the wire, in the target's dtype.
        bucket: `[N]` index of the receiver's bucket.
        slice_id: `[N]` equal for rows that contain the same elements of the same source region.
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
    """Distinct rectangles of the source side and their holders.

    `holders[offsets[i]:offsets[i+1]]` are the classes of source ranks that hold region i.
    """

    tensor: Array
    start: Array
    size: Array
    offsets: Array
    holders: Array


@dataclass(frozen=True)
class Sends:
    """Assignment of deliveries to senders. In each entry, rank `source` sends row `delivery` to
    `SlicePlan.receivers(class)[first:last]`.
    """

    delivery: Array
    source: Array
    first: Array
    last: Array


@dataclass(frozen=True)
class SlicePlan:
    """A complete transfer plan.

    `phase[r]` is the first bucket of engine rank r; the rank processes its buckets in order from
    there and wraps around.
    """

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
        """Return the engine ranks of a class, in the order used by `Sends`."""
        return np.flatnonzero(self.target.rank_class == receiver_class)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan and its hash as JSON-able data."""
        tables = {
            name: columns_of(getattr(self, name)) for name in ("regions", "deliveries", "sends")
        }
        return {
            "version": VERSION,
            "hash": self.digest(),
            "catalog": columns_of(self.catalog),
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            **tables,
            "phase": self.phase.tolist(),
            "bucket_bytes": self.bucket_bytes,
            "conversions": list(map(list, self.conversions)),
        }

    def digest(self) -> str:
        """Return the platform-independent sha256 of all columns. Both ends compare it before a
        transfer."""
        digest = hashlib.sha256(
            json.dumps([VERSION, self.bucket_bytes, self.catalog.names, self.conversions]).encode()
        )
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
    """Concatenate the pieces of all classes into one table, without padding.

    Columns: class, row, tensor, start, size, buffer, local.
    """

    counts = [len(rank.tensor) for rank in layout.classes]
    table = {
        "class": np.repeat(np.arange(len(counts)), counts),
        "row": np.concatenate([*map(np.arange, counts)]),
    }
    for name in ("tensor", "start", "size", "buffer", "local"):
        table[name] = np.concatenate([getattr(rank, name) for rank in layout.classes])
    real = table["tensor"] != PADDING
    return {name: values[real] for name, values in table.items()}


def buffer_item_bytes(layout: Layout, table: Mapping[str, Array]) -> Array:
    """Return, for each row of `piece_columns`, the element size in bytes of its buffer.

    Raises:
        WeightSyncError: a dtype is not in `ITEM_BYTES`.
    """
    unknown = sorted(layout.dtypes() - ITEM_BYTES.keys())
    if unknown:
        raise WeightSyncError(
            f"dtype {', '.join(unknown)} is not supported; supported dtypes: "
            f"{', '.join(ITEM_BYTES)}"
        )
    sizes: list[int] = []
    firsts = []
    for rank in layout.classes:
        firsts.append(len(sizes))
        sizes += [ITEM_BYTES[dtype] for dtype in rank.dtypes]
    first = np.array(firsts, dtype=np.int64)
    buffer = first[table["class"]] + table["buffer"]
    return np.array(sizes, dtype=np.int64)[buffer]
