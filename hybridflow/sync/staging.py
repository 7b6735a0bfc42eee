"""A rank's memory for the messages of a sync, and the slices of messages as views of that memory and of the rank's
buffers: prepared once for all syncs of a session, copied in bulk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from math import prod

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.models.fp8 import FP8
from hybridflow.reshard.fp8_blocks import SCALES
from hybridflow.reshard.layout import DIMS, ITEM_BYTES
from hybridflow.sync.messages import Item, Message
from hybridflow.sync.payload import DIGEST_BYTES, Digest, Payload, digest, message_key, seeds_of
from hybridflow_kernels.fp8_cast import write_scales, write_weights
from hybridflow_kernels.slices import Slice, Slices

# fp8 is made at the sender, nothing else is done with it: copied as bytes, which every kernel of every device can
_DTYPES = {name: torch.uint8 if name == FP8 else getattr(torch, name) for name in ITEM_BYTES}


@dataclass(frozen=True)
class _Slice:
    """A rectangle of a buffer and the bytes of the message that it fills, from `begin`."""

    item: Item
    begin: int


class Copies:
    """The prepared copies between one set of buffers and its messages: on a CPU in bulk, with the checksum while a
    message is still in the cache; on a GPU by the kernel that copies and takes the checksum in one read."""

    def __init__(self, messages: Sequence[Message], buffers: Mapping[str, torch.Tensor]) -> None:
        self._messages = messages
        self._prepared: dict[int, Slices] = {}
        self._slices = [_slices(message) for message in messages]
        self._local = [[_rectangle(buffers, piece.item) for piece in pieces] for pieces in self._slices]
        self._made = [
            {index for index, piece in enumerate(pieces) if piece.item.blocks is not None} for pieces in self._slices
        ]
        self._whole = [_payload_of(pieces, local) for pieces, local in zip(self._slices, self._local, strict=True)]
        self._packed: dict[tuple[int, Payload], list[torch.Tensor]] = {}
        self.device = next(iter(buffers.values())).device if buffers else torch.device("cpu")

    def whole(self, number: int) -> Payload | None:
        """The bytes of the buffer that are the message as they lie there, if it is one contiguous slice of one
        dtype."""
        return self._whole[number]

    def pack(self, number: int, payload: Payload, seed: int) -> Digest:
        """Copy the slices of a message into `payload`, cast to the engine's dtypes or made of blocks; returns its
        checksum."""
        if self.device.type != "cpu":
            return self._in_one_read(number).pack(payload.tensor, seed)
        views, local = self._views(number, payload), self._local[number]
        if made := self._made[number]:
            for index in made:
                _make(self._slices[number][index].item, local[index], views[index])
            views, local = ([view for index, view in enumerate(some) if index not in made] for some in (views, local))
        if views:
            torch._foreach_copy_(views, local)
        return digest(payload, seed)

    def unpack(self, number: int, payload: Payload, seed: int) -> Digest:
        """Copy the slices of a message from `payload` into the buffers; returns the checksum of what was read."""
        if self.device.type != "cpu":
            return self._in_one_read(number).scatter(payload.tensor, seed)
        found = digest(payload, seed)
        self.scatter(number, payload)
        return found

    def scatter(self, number: int, payload: Payload) -> None:
        """Copy the slices of a message from `payload` into the buffers."""
        torch._foreach_copy_(self._local[number], self._views(number, payload))

    def forget_payloads(self) -> None:
        """Forget the places of slices in payloads, which keep the payloads' memory alive."""
        self._packed = {}

    def _in_one_read(self, number: int) -> Slices:
        if number not in self._prepared:
            pieces = zip(self._slices[number], self._local[number], strict=True)
            nbytes = self._messages[number].nbytes
            self._prepared[number] = Slices([_kernel_slice(piece, view) for piece, view in pieces], nbytes)
        return self._prepared[number]

    def _views(self, number: int, payload: Payload) -> list[torch.Tensor]:
        """The slices' places in a payload; a message comes to lie in one of few places, so they are kept."""
        key = (number, payload)
        if key not in self._packed:
            self._packed[key] = [
                payload.tensor[piece.begin : piece.begin + prod(piece.item.size) * ITEM_BYTES[piece.item.dtype]]
                .view(_DTYPES[piece.item.dtype])
                .view(piece.item.size)
                for piece in self._slices[number]
            ]
        return self._packed[key]


def _slices(message: Message) -> list[_Slice]:
    """The message's slices in order; neighbours that are one rectangle of the buffer are one."""
    pieces: list[_Slice] = []
    begin = 0
    for item in message.items:
        last = pieces[-1].item if pieces else None
        axis = _joins(last, item) if last is not None else None
        if last is not None and axis is not None:
            size = (*last.size[:axis], last.size[axis] + item.size[axis], *last.size[axis + 1 :])
            pieces[-1] = replace(pieces[-1], item=replace(last, size=size))
        else:
            pieces.append(_Slice(item, begin))
        begin += prod(item.size) * ITEM_BYTES[item.dtype]
    return pieces


def _payload_of(pieces: list[_Slice], local: list[torch.Tensor]) -> Payload | None:
    if len(pieces) != 1 or pieces[0].item.blocks is not None:
        return None
    view = local[0]
    fits = view.is_contiguous() and view.dtype == _DTYPES[pieces[0].item.dtype]
    return Payload(view.view(-1).view(torch.uint8)) if fits else None


def _joins(first: Item, second: Item) -> int | None:
    """The axis along which `second` continues `first`, in the buffer and in the message alike; None where it does
    not."""
    if (
        first.buffer != second.buffer
        or first.dtype != second.dtype
        or first.blocks is not None
        or second.blocks is not None
    ):
        return None
    apart = [d for d in range(DIMS) if first.start[d] != second.start[d] or first.size[d] != second.size[d]]
    # packed row after row, the two are one block only if nothing before the axis is longer than one
    axis = next((d for d in range(DIMS) if first.start[d] != second.start[d]), None)
    if axis is None or apart != [axis] or prod(first.size[:axis]) != 1:
        return None
    return axis if first.start[axis] + first.size[axis] == second.start[axis] else None


def _kernel_slice(piece: _Slice, view: torch.Tensor) -> Slice:
    item = piece.item
    if item.blocks is None:
        return Slice(view, piece.begin, item.size, _DTYPES[item.dtype])
    dtype = torch.float32 if item.blocks.makes == SCALES else torch.float8_e4m3fn
    return Slice(view, piece.begin, item.size, dtype, item.blocks.block, item.start[1], item.start[2])


def _make(item: Item, weights: torch.Tensor, view: torch.Tensor) -> None:
    """Write the block-wise fp8 weights, or their scales, that the item names."""
    assert item.blocks is not None
    if item.blocks.makes == SCALES:
        write_scales(weights, item.blocks.block, view)
    else:
        write_weights(weights, item.blocks.block, item.start[1], item.start[2], view.view(torch.float8_e4m3fn))


def _rectangle(buffers: Mapping[str, torch.Tensor], item: Item) -> torch.Tensor:
    """What of the buffer is read or written."""
    starts, sizes = (item.blocks.start, item.blocks.size) if item.blocks else (item.start, item.size)
    whole = buffers.get(item.buffer)
    if whole is None:
        raise WeightSyncError(
            f"the plan names a buffer {item.buffer}, which this rank does not have; make the plan from this rank's "
            "layout"
        )
    shape = (*(1,) * (DIMS - whole.dim()), *whole.shape)
    if any(start + size > full for start, size, full in zip(starts, sizes, shape, strict=True)):
        raise WeightSyncError(
            f"{item.buffer} has shape {tuple(whole.shape)}, the plan takes {sizes} from {starts} on; make the plan "
            "from this rank's layout"
        )
    view = rectangle(whole.detach(), starts, sizes)
    return view.view(torch.uint8) if item.dtype == FP8 and item.blocks is None else view


def rectangle(buffer: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """`buffer[start : +size]`, the buffer seen in as many dimensions as layouts and plans have."""
    view = buffer[(None,) * (DIMS - buffer.dim())]
    for axis, (first, length) in enumerate(zip(start, size, strict=True)):
        view = view.narrow(axis, int(first), int(length))
    return view


_ALIGN = 64  # bytes; of each message among others in a slab


class _Staging:
    """Lives as long as the session, may outlive it; a new channel begins a new count of syncs.

    Args:
        rank: of the trainer or of the engine. slots: messages that may be under way at a time, two or more.
    """

    def __init__(self, rank: int, slots: int = 2) -> None:
        self.rank, self.slots = rank, slots
        self._copies: Copies | None = None  # of the last messages and buffers, for as long as these stay where they are
        self._prepared: tuple[Sequence[Message], list[tuple[str, int]]] = ((), [])  # these messages, and where they are
        self.slabs: list[torch.Tensor] = []
        self._placed: tuple[Copies, bool, list[Payload]] | None = None
        self._channel: object = None
        self._syncs = 0
        self._messages: Sequence[Message] | None = None
        self._keys: list[int] = []

    def begin(self, channel: object, messages: Sequence[Message]) -> list[int]:
        """Begin a sync: the seeds of its messages' checksums. Both ends count a session's syncs alike."""
        if channel is not self._channel:
            self.forget()  # some views may be of the former channel's memory
            self._channel, self._syncs = channel, 0
        if messages is not self._messages:
            self._messages, self._keys = messages, [self._key(message) for message in messages]
        self._syncs += 1
        return seeds_of(self._keys, self._syncs)

    def _key(self, message: Message) -> int:
        raise NotImplementedError

    def prepare(self, messages: Sequence[Message], buffers: Mapping[str, torch.Tensor]) -> Copies:
        """The copies between these messages and buffers.

        Raises:
            WeightSyncError: a buffer is missing, or too small for a slice.
        """
        where = [(name, buffer.data_ptr()) for name, buffer in buffers.items()]
        known, known_where = self._prepared
        if self._copies is None or known is not messages or known_where != where:
            self._copies = None
            self._copies, self._prepared = Copies(messages, buffers), (messages, where)
        return self._copies

    def places(self, messages: Sequence[Message], copies: Copies, keep: bool) -> list[Payload]:
        """Where each message lies, from sync to sync the same objects.

        Args:
            keep: side by side in one slab, all of them. Else: one that is a slice as it lies in its buffer lies there,
                the others in `slots` slabs, which take turns.
        """
        if self._placed is None or self._placed[:2] != (copies, keep):
            self._placed = (copies, keep, (self._side_by_side if keep else self._in_turn)(messages, copies))
        return self._placed[2]

    def _in_turn(self, messages: Sequence[Message], copies: Copies) -> list[Payload]:
        wholes = [copies.whole(number) for number in range(len(messages))]
        packed = [message for message, whole in zip(messages, wholes, strict=True) if whole is None]
        slabs = cycle(self._allocate(self.slots, largest_message(packed), copies.device) if packed else [])
        return [
            whole or Payload(next(slabs)[: message.nbytes]) for message, whole in zip(messages, wholes, strict=True)
        ]

    def _side_by_side(self, messages: Sequence[Message], copies: Copies) -> list[Payload]:
        ends = [0, *accumulate(-(-message.nbytes // _ALIGN) * _ALIGN for message in messages)]
        (slab,) = self._allocate(1, ends[-1], copies.device)
        return [Payload(slab[begin : begin + message.nbytes]) for begin, message in zip(ends, messages, strict=False)]

    def _allocate(self, count: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
        """`count` slabs of `nbytes`, those of the last sync where they fit."""
        fits = len(self.slabs) == count and all(slab.numel() >= nbytes and slab.device == device for slab in self.slabs)
        if not fits:
            if self.slabs:
                self.release()
            self.slabs = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        return self.slabs

    def release(self) -> None:
        """Give all memory back; the next sync makes it anew. Views of the rank's buffers stay."""
        self.slabs, self._placed = [], None
        if self._copies is not None:
            self._copies.forget_payloads()

    def forget(self) -> None:
        """Forget all views; the next sync makes them anew."""
        self._copies = self._placed = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs."""
        return sum(slab.untyped_storage().nbytes() for slab in self.slabs)


class SendStaging(_Staging):
    """The staging memory of trainer rank `rank`, for `stream.send_stream`."""

    def _key(self, message: Message) -> int:
        return message_key(self.rank, message.peer, message.tag)


class ReceiveStaging(_Staging):
    """The staging memory of engine rank `rank`, for `stream.receive_stream`."""

    def _key(self, message: Message) -> int:
        return message_key(message.peer, self.rank, message.tag)


def largest_message(messages: Sequence[Message]) -> int:
    """Bytes of the largest, the one with a pair's checksums included."""
    counts = Counter(message.peer for message in messages)
    return max([0, *(message.nbytes for message in messages), *(seal_bytes(count) for count in counts.values())])


def seal_bytes(messages: int) -> int:
    """Bytes of the message with the checksums of so many."""
    return DIGEST_BYTES * messages
