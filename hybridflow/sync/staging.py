"""A rank's staging memory for a sync, and views of message slices in that memory and in the rank's
buffers.

Views are prepared once for all syncs of a session and copied in bulk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.models.fp8 import FP8
from hybridflow.reshard.fp8_blocks import SCALES
from hybridflow.reshard.layout import DIMS, ITEM_BYTES, padded
from hybridflow.sync.messages import Item, Message, item_bytes
from hybridflow.sync.transports.base import (
    DIGEST_BYTES,
    Digest,
    Payload,
    digest,
    message_key,
    seeds_of,
)
from hybridflow_kernels.fp8_cast import write_scales, write_weights
from hybridflow_kernels.slices import Slice, Slices

# Only the sender operates on fp8 values. Elsewhere they are copied as bytes, which every kernel on
# every device supports.
_DTYPES = {name: torch.uint8 if name == FP8 else getattr(torch, name) for name in ITEM_BYTES}


@dataclass(frozen=True)
class _Slice:
    """A rectangle of a buffer, stored in the message from byte offset `begin`."""

    item: Item
    begin: int


class Copies:
    """Prepared copies between one set of buffers and its messages.

    On a CPU, slices are copied in bulk and the checksum is computed while the message is still
    cached. On a GPU, one kernel copies and computes the checksum in a single read.
    """

    def __init__(self, messages: Sequence[Message], buffers: Mapping[str, torch.Tensor]) -> None:
        self._messages = messages
        self._prepared: dict[int, Slices] = {}
        self._slices: list[list[_Slice]] = []
        self._local: list[list[torch.Tensor]] = []  # the slices' views of the buffers
        self._made: list[set[int]] = []  # indices of the slices that are computed from blocks
        self._whole: list[Payload | None] = []
        for message in messages:
            pieces = _slices(message)
            local = [_rectangle(buffers, piece.item) for piece in pieces]
            made = {i for i, piece in enumerate(pieces) if piece.item.blocks is not None}
            self._slices.append(pieces)
            self._local.append(local)
            self._made.append(made)
            self._whole.append(_payload_of(pieces, local))
        self._packed: dict[tuple[int, Payload], list[torch.Tensor]] = {}
        first = next(iter(buffers.values()), None)
        self.device = torch.device("cpu") if first is None else first.device

    def whole(self, number: int) -> Payload | None:
        """Return the message's bytes in the buffer if it is one contiguous slice without a cast,
        otherwise None."""
        return self._whole[number]

    def pack(self, number: int, payload: Payload, seed: int) -> Digest:
        """Pack the slices of a message into `payload` and return its checksum.

        Slices are cast to the engine's dtypes or computed from blocks.
        """
        if self.device.type != "cpu":
            return self._in_one_read(number).pack(payload.tensor, seed)
        views = self._views(number, payload)
        local = self._local[number]
        if made := self._made[number]:
            pieces = self._slices[number]
            for index in made:
                _make(pieces[index].item, local[index], views[index])
            copied = [index for index in range(len(views)) if index not in made]
            views = [views[index] for index in copied]
            local = [local[index] for index in copied]
        if views:
            torch._foreach_copy_(views, local)
        return digest(payload, seed)

    def unpack(self, number: int, payload: Payload, seed: int) -> Digest:
        """Copy the slices of a message from `payload` into the buffers. Returns the checksum of the
        bytes read."""
        if self.device.type != "cpu":
            return self._in_one_read(number).scatter(payload.tensor, seed)
        found = digest(payload, seed)
        self.scatter(number, payload)
        return found

    def scatter(self, number: int, payload: Payload) -> None:
        """Copy the slices of a message from `payload` into the buffers."""
        torch._foreach_copy_(self._local[number], self._views(number, payload))

    def forget_payloads(self) -> None:
        """Drop cached views of payloads. The views keep the payloads' memory allocated."""
        self._packed = {}

    def _in_one_read(self, number: int) -> Slices:
        if number not in self._prepared:
            slices = list(map(_kernel_slice, self._slices[number], self._local[number]))
            self._prepared[number] = Slices(slices, self._messages[number].nbytes)
        return self._prepared[number]

    def _views(self, number: int, payload: Payload) -> list[torch.Tensor]:
        """Return views of the slices in a payload. They are cached, because a message uses only a
        few payloads."""
        key = (number, payload)
        if key not in self._packed:
            views = []
            for piece in self._slices[number]:
                item = piece.item
                data = payload.tensor[piece.begin : piece.begin + item_bytes(item)]
                views.append(data.view(_DTYPES[item.dtype]).view(item.size))
            self._packed[key] = views
        return self._packed[key]


def _slices(message: Message) -> list[_Slice]:
    """Return the message's slices in order, merging neighbours that form one rectangle of the
    buffer."""
    pieces: list[_Slice] = []
    begin = 0
    for item in message.items:
        axis = _joins(pieces[-1].item, item) if pieces else None
        if axis is None:
            pieces.append(_Slice(item, begin))
        else:
            last = pieces[-1].item
            size = list(last.size)
            size[axis] += item.size[axis]
            pieces[-1] = replace(pieces[-1], item=replace(last, size=tuple(size)))
        begin += item_bytes(item)
    return pieces


def _payload_of(pieces: list[_Slice], local: list[torch.Tensor]) -> Payload | None:
    if len(pieces) != 1:
        return None
    item = pieces[0].item
    view = local[0]
    if item.blocks is None and view.is_contiguous() and view.dtype == _DTYPES[item.dtype]:
        return Payload(view.view(-1).view(torch.uint8))
    return None


def _joins(first: Item, second: Item) -> int | None:
    """Return the axis along which `second` continues `first` in both buffer and message, or None if
    it does not."""
    if first.blocks is not None or second.blocks is not None:
        return None
    if first.buffer != second.buffer or first.dtype != second.dtype:
        return None
    apart = []
    for d in range(DIMS):
        if first.start[d] != second.start[d] or first.size[d] != second.size[d]:
            apart.append(d)
    if len(apart) != 1:
        return None
    axis = apart[0]
    # in row-major order the two are contiguous only if all dimensions before the axis have length
    # one
    if prod(first.size[:axis]) != 1:
        return None
    end = first.start[axis] + first.size[axis]
    return axis if end == second.start[axis] else None


def _kernel_slice(piece: _Slice, view: torch.Tensor) -> Slice:
    item = piece.item
    if item.blocks is None:
        return Slice(view, piece.begin, item.size, _DTYPES[item.dtype])
    dtype = torch.float32 if item.blocks.makes == SCALES else torch.float8_e4m3fn
    _, row, column = item.start
    return Slice(view, piece.begin, item.size, dtype, item.blocks.block, row, column)


def _make(item: Item, weights: torch.Tensor, view: torch.Tensor) -> None:
    """Write the block-wise fp8 weights or the scales that the item specifies."""
    assert item.blocks is not None
    block = item.blocks.block
    if item.blocks.makes == SCALES:
        write_scales(weights, block, view)
    else:
        _, row, column = item.start
        write_weights(weights, block, row, column, view.view(torch.float8_e4m3fn))


def _rectangle(buffers: Mapping[str, torch.Tensor], item: Item) -> torch.Tensor:
    """Return the region of the buffer that is read or written."""
    region = item if item.blocks is None else item.blocks
    starts = region.start
    sizes = region.size
    whole = buffers.get(item.buffer)
    if whole is None:
        raise WeightSyncError(
            f"the plan's buffer {item.buffer} does not exist on this rank; make the plan from this "
            "rank's layout"
        )
    shape = padded(whole.shape, 1)
    if any(start + size > full for start, size, full in zip(starts, sizes, shape, strict=True)):
        raise WeightSyncError(
            f"{item.buffer} has shape {tuple(whole.shape)}, but the plan reads {sizes} starting at "
            f"{starts}; make the plan from this rank's layout"
        )
    view = rectangle(whole.detach(), starts, sizes)
    return view.view(torch.uint8) if item.dtype == FP8 and item.blocks is None else view


def rectangle(buffer: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return `buffer[start : start + size]`, with the buffer viewed in the number of dimensions
    used by layouts and plans."""
    view = buffer.view(padded(buffer.shape, 1)) if buffer.dim() > DIMS else buffer
    view = view[(None,) * (DIMS - view.dim())]
    for axis, (first, length) in enumerate(zip(start, size, strict=True)):
        view = view.narrow(axis, int(first), int(length))
    return view


_ALIGN = 64  # alignment in bytes of the messages in a shared slab


class _Staging:
    """A rank's staging memory for a session. It may outlive the session. The sync count restarts at
    each new channel.

    Args:
        rank: number of the trainer or engine rank.
        slots: maximum number of messages in flight at a time, two or more.
    """

    def __init__(self, rank: int, slots: int = 2) -> None:
        self.rank = rank
        self.slots = slots
        # prepared for the last messages and buffers; valid until the buffers move
        self._copies: Copies | None = None
        # those messages, and the buffers' addresses
        self._prepared: tuple[Sequence[Message], list[tuple[str, int]]] = ((), [])
        self.slabs: list[torch.Tensor] = []
        self._placed: tuple[Copies, bool, list[Payload]] | None = None
        self._channel: object = None
        self._syncs = 0
        self._messages: Sequence[Message] | None = None
        self._keys: list[int] = []

    def begin(self, channel: object, messages: Sequence[Message]) -> list[int]:
        """Begin a sync and return the checksum seeds of its messages. Both ends derive the same
        seeds, because both count the session's syncs."""
        if channel is not self._channel:
            self.forget()  # some views may refer to the previous channel's memory
            self._channel = channel
            self._syncs = 0
        if messages is not self._messages:
            self._keys = list(map(self._key, messages))
            self._messages = messages
        self._syncs += 1
        return seeds_of(self._keys, self._syncs)

    def _key(self, message: Message) -> int:
        raise NotImplementedError

    def prepare(self, messages: Sequence[Message], buffers: Mapping[str, torch.Tensor]) -> Copies:
        """Prepare the copies between these messages and buffers. The result is cached until either
        changes.

        Raises:
            WeightSyncError: a buffer is missing, or too small for a slice.
        """
        where = [(name, buffer.data_ptr()) for name, buffer in buffers.items()]
        known, known_where = self._prepared
        if self._copies is None or known is not messages or known_where != where:
            self._copies = None
            self._copies = Copies(messages, buffers)
            self._prepared = (messages, where)
        return self._copies

    def places(self, messages: Sequence[Message], copies: Copies, keep: bool) -> list[Payload]:
        """Return each message's memory. The objects are the same in every sync.

        Args:
            keep: if True, place all messages next to each other in one slab. If False, contiguous
                slices are sent in place and the rest rotate through `slots` slabs.
        """
        if self._placed is None or self._placed[:2] != (copies, keep):
            place = self._side_by_side if keep else self._in_turn
            self._placed = (copies, keep, place(messages, copies))
        return self._placed[2]

    def _in_turn(self, messages: Sequence[Message], copies: Copies) -> list[Payload]:
        wholes = list(map(copies.whole, range(len(messages))))
        packed = [message for message, whole in zip(messages, wholes, strict=True) if whole is None]
        slabs: list[torch.Tensor] = []
        if packed:
            slabs = self._allocate(self.slots, largest_message(packed), copies.device)
        next_slab = cycle(slabs)
        payloads: list[Payload] = []
        for message, whole in zip(messages, wholes, strict=True):
            payloads.append(whole or Payload(next(next_slab)[: message.nbytes]))
        return payloads

    def _side_by_side(self, messages: Sequence[Message], copies: Copies) -> list[Payload]:
        begins = []
        end = 0
        for message in messages:
            begins.append(end)
            end += -(-message.nbytes // _ALIGN) * _ALIGN
        (slab,) = self._allocate(1, end, copies.device)
        payloads: list[Payload] = []
        for begin, message in zip(begins, messages, strict=True):
            payloads.append(Payload(slab[begin : begin + message.nbytes]))
        return payloads

    def _allocate(self, count: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
        """Return `count` slabs of at least `nbytes`, reusing the slabs of the last sync if they
        fit.
        """
        fits = len(self.slabs) == count
        for slab in self.slabs:
            fits = fits and slab.numel() >= nbytes and slab.device == device
        if not fits:
            if self.slabs:
                self.release()
            self.slabs = [
                torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)
            ]
        return self.slabs

    def release(self) -> None:
        """Free all slabs; the next sync reallocates them. Views of the rank's buffers are kept."""
        self.slabs = []
        self._placed = None
        if self._copies is not None:
            self._copies.forget_payloads()

    def forget(self) -> None:
        """Drop all views; the next sync recreates them."""
        self._copies = self._placed = None

    @property
    def nbytes(self) -> int:
        """Total size of the slabs in bytes."""
        return sum(slab.untyped_storage().nbytes() for slab in self.slabs)


class SendStaging(_Staging):
    """Staging memory of trainer rank `rank`, for `stream.send_stream`."""

    def _key(self, message: Message) -> int:
        return message_key(self.rank, message.peer, message.tag)


class ReceiveStaging(_Staging):
    """Staging memory of engine rank `rank`, for `stream.receive_stream`."""

    def _key(self, message: Message) -> int:
        return message_key(message.peer, self.rank, message.tag)


def largest_message(messages: Sequence[Message]) -> int:
    """Return the size in bytes of the largest message, including the checksum message of each
    pair."""
    counts = Counter(message.peer for message in messages)
    sizes = [message.nbytes for message in messages]
    sizes += map(seal_bytes, counts.values())
    return max(sizes, default=0)


def seal_bytes(messages: int) -> int:
    """Return the size in bytes of the message that contains the checksums of `messages`
    messages."""
    return DIGEST_BYTES * messages
