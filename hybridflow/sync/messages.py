"""What one rank does under a plan: its messages in order, with the place of every slice in its own buffers.

A message is what one sender gives one receiver of one bucket, slices one after another, contiguous, those with wider
elements first: so every slice begins at a multiple of its element's size. A message can be cut into parts, each a
message of its own, that fit a cache: what has just been packed is then still there when its checksum is taken and when
it is sent. Sender and receiver go through messages in the order of (step, part, peer), so at every moment one message
with the lowest step and part can move: no cycle of waits is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from hybridflow.models.fp8 import FP8
from hybridflow.reshard.fp8_blocks import Blocks, Quantised, made_by_sender
from hybridflow.reshard.layout import ITEM_BYTES, Layout
from hybridflow.reshard.regions import group_rows
from hybridflow.reshard.slices import SlicePlan, piece_columns

MAX_PARTS = 4096  # of a bucket
_LARGE = 4  # a slice of a fourth of a part is a part of its own


@dataclass(frozen=True)
class Item:
    """A slice in a rank's buffer: rectangle of the buffer's shape (padded with ones from the left to three dimensions).

    `dtype` is that of the wire: the engine's. Where a sender makes block-wise fp8, `blocks` are what it reads of the
    buffer, and the rectangle is one of what it makes of them.
    """

    buffer: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str
    blocks: Blocks | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Item:
        """From what `dataclasses.asdict` and JSON have made of one."""
        made, blocks = data["blocks"], None
        if made is not None:
            rows, columns = made["block"]
            blocks = Blocks(made["makes"], tuple(made["start"]), tuple(made["size"]), (rows, columns))
        return cls(data["buffer"], tuple(data["start"]), tuple(data["size"]), data["dtype"], blocks)


@dataclass(frozen=True)
class Message:
    """`peer` is an engine rank for a sender and a trainer rank for a receiver. `nbytes` in the engine's dtype. `part`
    of its bucket."""

    step: int
    bucket: int
    peer: int
    nbytes: int
    items: tuple[Item, ...]
    part: int = 0

    @cached_property
    def tag(self) -> int:
        """Distinct among the messages of a pair of ranks in one sync."""
        return self.bucket * MAX_PARTS + self.part


class Messages:
    """Reads a plan from the point of view of single ranks.

    Args:
        part_bytes: a message with more is cut into parts of at most so many; 0 leaves buckets whole. A row of a slice,
            and what a sender makes of fp8 blocks, is not cut. Large slices are parts of their own: those that are
            contiguous need not be packed then.
    """

    def __init__(self, plan: SlicePlan, part_bytes: int = 0) -> None:
        self.plan = plan
        self._part_bytes = max(part_bytes, 16 * plan.bucket_bytes // MAX_PARTS) if part_bytes else 0
        table = plan.deliveries
        buckets = np.zeros(len(plan.target.classes), dtype=np.int64)
        np.maximum.at(buckets, table.receiver, table.bucket + 1)
        self.num_buckets = buckets
        have, regions = piece_columns(plan.source), plan.regions
        rows = [np.column_stack([x["tensor"], x["start"], x["size"]]) for x in (have, vars(regions))]
        _, same = group_rows(np.concatenate(rows))
        self._width = int(same.max(initial=0)) + 1
        keys = have["class"] * self._width + same[: len(have["tensor"])]
        # a region that a rank holds twice (tied weights) is read from the first place
        self._keys, first = np.unique(keys, return_index=True)
        self._place = have["row"][first]
        self._region = same[len(have["tensor"]) :]
        self._is_scale = Quantised.of(plan.catalog).weight_of >= 0

    def outgoing(self, rank: int) -> list[Message]:
        """Messages that a trainer rank sends, in order."""
        plan, sends, table = self.plan, self.plan.sends, self.plan.deliveries
        mine = np.flatnonzero(sends.source == rank)
        counts = (sends.last - sends.first)[mine]
        row = np.repeat(sends.delivery[mine], counts)
        peers = [
            plan.receivers(int(table.receiver[sends.delivery[s]]))[sends.first[s] : sends.last[s]]
            for s in mine.tolist()
        ]
        peer = np.concatenate(peers) if peers else np.empty(0, dtype=np.int64)
        number = int(plan.source.rank_class[rank])
        layout = plan.source.classes[number]
        wanted = number * self._width + self._region[table.region[row]]
        piece = self._place[np.searchsorted(self._keys, wanted)]
        local = layout.local[piece] + table.start[row] - layout.start[piece]
        return self._group(row, peer, self._step(row, peer), plan.source, number, piece, local)

    def incoming(self, rank: int) -> list[Message]:
        """Messages that an engine rank receives, in order."""
        plan, sends, table = self.plan, self.plan.sends, self.plan.deliveries
        number = int(plan.target.rank_class[rank])
        position = int(np.searchsorted(plan.receivers(number), rank))
        mine = (table.receiver[sends.delivery] == number) & (sends.first <= position) & (position < sends.last)
        row, peer = sends.delivery[mine], sends.source[mine]
        layout, piece = plan.target.classes[number], table.piece[row]
        local = layout.local[piece] + table.start[row] - layout.start[piece]
        step = self._step(row, np.full(len(row), rank))
        return self._group(row, peer, step, plan.target, number, piece, local)

    def _wire_dtypes(self, row: np.ndarray) -> list[str]:
        """The engine's dtype of each delivery."""
        table, classes = self.plan.deliveries, self.plan.target.classes
        pairs = zip(table.receiver[row].tolist(), table.piece[row].tolist(), strict=True)
        return [classes[number].dtypes[int(classes[number].buffer[piece])] for number, piece in pairs]

    def _step(self, row: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        table, plan = self.plan.deliveries, self.plan
        return (table.bucket[row] - plan.phase[receiver]) % self.num_buckets[plan.target.rank_class[receiver]]

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
        table, layout = self.plan.deliveries, side.classes[number]
        dtypes = self._wire_dtypes(row)
        width = np.array([ITEM_BYTES[dtype] for dtype in dtypes], dtype=np.int64)
        order = np.lexsort((row, -width, peer, step))
        row, peer, step, piece, local = row[order], peer[order], step[order], piece[order], local[order]
        is_new = np.ones(len(row), dtype=bool)
        is_new[1:] = (step[1:] != step[:-1]) | (peer[1:] != peer[:-1])
        bounds = [*np.flatnonzero(is_new).tolist(), len(row)]
        dtypes = [dtypes[n] for n in order.tolist()]
        delivered = (piece, table.start[row], table.size[row], dtypes)
        made = made_by_sender(self.plan.catalog, layout, *delivered) if side is self.plan.source else {}

        def item(i: int) -> Item:
            read, start, blocks = made.get(i, (int(piece[i]), tuple(local[i].tolist()), None))
            return Item(
                layout.names[int(layout.buffer[read])], start, tuple(table.size[row[i]].tolist()), dtypes[i], blocks
            )

        whole = self._is_whole(layout.tensor[piece], dtypes)
        messages = []
        for low, high in pairwise(bounds):
            parts = _cut([(item(i), whole[i]) for i in range(low, high)], self._part_bytes)
            for part, items in enumerate(parts):
                nbytes = sum(map(item_bytes, items))
                messages.append(
                    Message(int(step[low]), int(table.bucket[row[low]]), int(peer[low]), nbytes, items, part)
                )
        return sorted(messages, key=lambda message: (message.step, message.part, message.peer))

    def _is_whole(self, tensor: np.ndarray, dtypes: list[str]) -> list[bool]:
        """Slices that a sender makes of fp8 blocks; the receiver, which sees nothing of that, must not cut them
        either."""
        return [scale or dtype == FP8 for scale, dtype in zip(self._is_scale[tensor].tolist(), dtypes, strict=True)]


def item_bytes(item: Item) -> int:
    """Bytes of a slice on the wire."""
    return prod(item.size) * ITEM_BYTES[item.dtype]


def _cut(items: list[tuple[Item, bool]], limit: int) -> list[tuple[Item, ...]]:
    """The items (and whether each has to stay whole) in parts of at most `limit` bytes; 0: in one."""
    if not limit:
        return [tuple(item for item, _ in items)]
    parts: list[tuple[Item, ...]] = []
    together: list[Item] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        parts.extend([tuple(together)] if together else [])
        together.clear()
        filled = 0

    for item, is_whole in items:
        nbytes = item_bytes(item)
        if nbytes >= limit // _LARGE or filled + nbytes > limit:
            close()
        if nbytes >= limit // _LARGE:
            parts.extend((piece,) for piece in ([item] if is_whole else _rows(item, -(-nbytes // limit))))
        else:
            together.append(item)
            filled += nbytes
    close()
    return parts


def _rows(item: Item, count: int) -> list[Item]:
    """The item in about `count` pieces of about as many rows each; rows along the first axis that is longer than
    one."""
    axis = next((axis for axis, length in enumerate(item.size) if length > 1), len(item.size) - 1)
    length = item.size[axis]
    step = max(1, length // count)
    pieces = []
    for begin in range(0, length, step):
        start = (*item.start[:axis], item.start[axis] + begin, *item.start[axis + 1 :])
        pieces.append(
            replace(item, start=start, size=(*item.size[:axis], min(step, length - begin), *item.size[axis + 1 :]))
        )
    return pieces
