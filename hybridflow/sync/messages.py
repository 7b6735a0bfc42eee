"""A rank's part of a plan: its messages in order, with every slice's position in the rank's
buffers.

A message contains the slices of one bucket from one sender to one receiver, concatenated without
gaps. Slices with wider elements come first, so every slice is aligned to its element size. A
message can be split into cache-sized parts, each sent as a separate message. A part is then still
cached when its checksum is computed and when it is sent. Sender and receiver process messages in
the order (step, part, peer). The message with the lowest step and part can therefore always
proceed, so no cycle of waits is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from hybridflow.models.fp8 import FP8
from hybridflow.reshard.fp8_blocks import Blocks, Quantised, made_by_sender
from hybridflow.reshard.layout import ITEM_BYTES, Layout
from hybridflow.reshard.regions import group_rows
from hybridflow.reshard.slices import SlicePlan, piece_columns

MAX_PARTS = 4096  # per bucket
_LARGE = 4  # a slice of at least a quarter of a part becomes a separate part


@dataclass(frozen=True)
class Item:
    """A slice in a rank's buffer: a rectangle of the buffer's shape, left-padded with ones to three
    dimensions.

    `dtype` is the wire dtype, which is the same as the engine's. If the sender computes block-wise
    fp8, `blocks` is the region that it reads from the buffer, and the rectangle is relative to the
    computed output.
    """

    buffer: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str
    blocks: Blocks | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Item:
        """Rebuild an item from `dataclasses.asdict` after a JSON round trip."""
        made = data["blocks"]
        blocks = None
        if made is not None:
            rows, columns = made["block"]
            start = tuple(made["start"])
            blocks = Blocks(made["makes"], start, tuple(made["size"]), (rows, columns))
        start = tuple(data["start"])
        return cls(data["buffer"], start, tuple(data["size"]), data["dtype"], blocks)


@dataclass(frozen=True)
class Message:
    """A message between two ranks.

    Attributes:
        step: position in the receiver's order of buckets.
        bucket: index of the receiver's bucket.
        peer: an engine rank for a sender, a trainer rank for a receiver.
        nbytes: size in the engine's dtype.
        items: the slices in order.
        part: index within the bucket.
    """

    step: int
    bucket: int
    peer: int
    nbytes: int
    items: tuple[Item, ...]
    part: int = 0

    @cached_property
    def tag(self) -> int:
        """Tag of the message, unique within one sync among the messages between the same two
        ranks."""
        return self.bucket * MAX_PARTS + self.part


class Messages:
    """Per-rank view of a plan.

    Args:
        part_bytes: larger messages are split into parts of at most this size; 0 keeps buckets
            whole. A single row of a slice is never split, nor is output computed from fp8 blocks.
            Large slices become separate parts, so that contiguous ones need no packing.
    """

    def __init__(self, plan: SlicePlan, part_bytes: int = 0) -> None:
        self.plan = plan
        self._part_bytes = max(part_bytes, 16 * plan.bucket_bytes // MAX_PARTS) if part_bytes else 0
        table = plan.deliveries
        buckets = np.zeros(len(plan.target.classes), dtype=np.int64)
        np.maximum.at(buckets, table.receiver, table.bucket + 1)
        self.num_buckets = buckets
        have = piece_columns(plan.source)
        rows = []
        for x in (have, vars(plan.regions)):
            rows.append(np.column_stack([x["tensor"], x["start"], x["size"]]))
        _, same = group_rows(np.concatenate(rows))
        held, self._region = np.split(same, [len(have["tensor"])])
        self._width = int(same.max(initial=0)) + 1
        keys = have["class"] * self._width + held
        # a region that a rank holds twice (tied weights) is read from the first position
        self._keys, first = np.unique(keys, return_index=True)
        self._place = have["row"][first]
        self._is_scale = Quantised.of(plan.catalog).weight_of >= 0

    def outgoing(self, rank: int) -> list[Message]:
        """Return the messages that a trainer rank sends, in order."""
        plan = self.plan
        sends = plan.sends
        table = plan.deliveries
        mine = np.flatnonzero(sends.source == rank)
        delivery = sends.delivery[mine]
        first = sends.first[mine]
        last = sends.last[mine]
        row = np.repeat(delivery, last - first)
        peers = [np.empty(0, dtype=np.int64)]
        for receiver, low, high in zip(table.receiver[delivery], first, last, strict=True):
            peers.append(plan.receivers(receiver)[low:high])
        peer = np.concatenate(peers)
        number = int(plan.source.rank_class[rank])
        layout = plan.source.classes[number]
        wanted = number * self._width + self._region[table.region[row]]
        piece = self._place[np.searchsorted(self._keys, wanted)]
        local = layout.local[piece] + table.start[row] - layout.start[piece]
        return self._group(row, peer, self._step(row, peer), plan.source, number, piece, local)

    def incoming(self, rank: int) -> list[Message]:
        """Return the messages that an engine rank receives, in order."""
        plan = self.plan
        sends = plan.sends
        table = plan.deliveries
        number = int(plan.target.rank_class[rank])
        position = int(np.searchsorted(plan.receivers(number), rank))
        is_mine = table.receiver[sends.delivery] == number
        is_mine &= sends.first <= position
        is_mine &= position < sends.last
        mine = np.flatnonzero(is_mine)
        row = sends.delivery[mine]
        peer = sends.source[mine]
        layout = plan.target.classes[number]
        piece = table.piece[row]
        local = layout.local[piece] + table.start[row] - layout.start[piece]
        step = self._step(row, np.full(len(row), rank))
        return self._group(row, peer, step, plan.target, number, piece, local)

    def _wire_dtypes(self, row: np.ndarray) -> list[str]:
        """Return the dtype of each delivery in the engine."""
        table = self.plan.deliveries
        classes = self.plan.target.classes
        pairs = zip(table.receiver[row].tolist(), table.piece[row].tolist(), strict=True)
        dtypes: list[str] = []
        for number, piece in pairs:
            layout = classes[number]
            dtypes.append(layout.dtypes[layout.buffer[piece]])
        return dtypes

    def _step(self, row: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        plan = self.plan
        after_phase = plan.deliveries.bucket[row] - plan.phase[receiver]
        return after_phase % self.num_buckets[plan.target.rank_class[receiver]]

    def _group(
        self,
        row: np.ndarray,
        peer: np.ndarray,
        step: np.ndarray,
        side: Layout,
        number: int,
        piece: np.ndarray,
        local: np.ndarray,
    ) -> list[Message]:
        dtypes = self._wire_dtypes(row)
        width = np.array([ITEM_BYTES[dtype] for dtype in dtypes], dtype=np.int64)
        order = np.lexsort((row, -width, peer, step))
        row = row[order]
        peer = peer[order]
        step = step[order]
        piece = piece[order]
        dtypes = [dtypes[n] for n in order.tolist()]
        items = self._items(row, side, number, piece, local[order], dtypes)
        whole = self._is_whole(side.classes[number].tensor[piece], dtypes)
        is_new = np.ones(len(row), dtype=bool)
        is_new[1:] = (step[1:] != step[:-1]) | (peer[1:] != peer[:-1])
        bounds = [*np.flatnonzero(is_new).tolist(), len(row)]
        flagged = list(zip(items, whole, strict=True))
        messages = []
        for low, high in pairwise(bounds):
            bucket = int(self.plan.deliveries.bucket[row[low]])
            other = int(peer[low])
            parts = _cut(flagged[low:high], self._part_bytes)
            for part, those in enumerate(parts):
                nbytes = sum(map(item_bytes, those))
                messages.append(Message(int(step[low]), bucket, other, nbytes, those, part))
        return sorted(messages, key=attrgetter("step", "part", "peer"))

    def _items(
        self,
        row: np.ndarray,
        side: Layout,
        number: int,
        piece: np.ndarray,
        local: np.ndarray,
        dtypes: list[str],
    ) -> list[Item]:
        table = self.plan.deliveries
        layout = side.classes[number]
        start = table.start[row]
        size = table.size[row]
        made: Mapping[int, tuple[int, tuple[int, ...], Blocks]] = {}
        if side is self.plan.source:
            made = made_by_sender(self.plan.catalog, layout, piece, start, size, dtypes)
        items = []
        for i, shape in enumerate(size.tolist()):
            read, place, blocks = made.get(i, (piece[i], tuple(local[i].tolist()), None))
            buffer = layout.names[layout.buffer[read]]
            items.append(Item(buffer, place, tuple(shape), dtypes[i], blocks))
        return items

    def _is_whole(self, tensor: np.ndarray, dtypes: list[str]) -> list[bool]:
        """Return a flag per slice: True if a sender computes it from fp8 blocks.

        The receiver does not know the blocks, but must not split these slices either.
        """
        whole: list[bool] = []
        for scale, dtype in zip(self._is_scale[tensor].tolist(), dtypes, strict=True):
            whole.append(scale or dtype == FP8)
        return whole


def item_bytes(item: Item) -> int:
    """Return the size of a slice on the wire in bytes."""
    return prod(item.size) * ITEM_BYTES[item.dtype]


def _cut(items: list[tuple[Item, bool]], limit: int) -> list[tuple[Item, ...]]:
    """Group items into parts of at most `limit` bytes, splitting large items unless their flag is
    True. A limit of 0 returns a single part."""
    if not limit:
        return [tuple(item for item, _ in items)]
    parts: list[tuple[Item, ...]] = []
    together: list[Item] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if together:
            parts.append(tuple(together))
        together.clear()
        filled = 0

    for item, is_whole in items:
        nbytes = item_bytes(item)
        is_large = nbytes >= limit // _LARGE
        if is_large or filled + nbytes > limit:
            close()
        if is_large and is_whole:
            parts.append((item,))
        elif is_large:
            count = -(-nbytes // limit)
            parts += [(piece,) for piece in _rows(item, count)]
        else:
            together.append(item)
            filled += nbytes
    close()
    return parts


def _rows(item: Item, count: int) -> list[Item]:
    """Split an item into about `count` pieces with similar numbers of rows.

    Rows are taken along the first axis that is longer than one.
    """
    last = len(item.size) - 1
    axis = next((axis for axis, length in enumerate(item.size) if length > 1), last)
    length = item.size[axis]
    step = max(1, length // count)
    start = list(item.start)
    size = list(item.size)
    pieces = []
    for begin in range(0, length, step):
        start[axis] = item.start[axis] + begin
        size[axis] = min(step, length - begin)
        pieces.append(replace(item, start=tuple(start), size=tuple(size)))
    return pieces
