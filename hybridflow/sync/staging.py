"""A rank's memory for messages under way, and what is prepared once for all syncs of a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, cycle

import torch

from hybridflow.sync.checksum import DIGEST_BYTES, message_key, seeds_of
from hybridflow.sync.messages import Message
from hybridflow.sync.payload import Payload
from hybridflow.sync.slice_views import Copies, MessageViews

_ALIGN = 64  # bytes; of each message among others in a slab


class _Staging:
    """Lives as long as the session, may outlive it; a new channel begins a new count of syncs.

    Args:
        rank: of the trainer or of the engine. slots: messages that may be under way at a time, two or more.
    """

    def __init__(self, rank: int, slots: int = 2) -> None:
        self.rank, self.slots = rank, slots
        self.views = MessageViews()
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
        turns = cycle(self._allocate(self.slots, largest_message(packed), copies.device) if packed else [])
        return [
            whole or Payload(next(turns)[: message.nbytes]) for message, whole in zip(messages, wholes, strict=True)
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
                self.release()  # views of the old slabs would keep them alive
            self.slabs = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        return self.slabs

    def release(self) -> None:
        """Give all memory back; the next sync makes it anew."""
        self.slabs = []
        self.forget()

    def forget(self) -> None:
        """Forget all views; the next sync makes them anew."""
        self.views.clear()
        self._placed = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs."""
        return sum(slab.untyped_storage().nbytes() for slab in self.slabs)


class SendStaging(_Staging):
    """For `stream.send_stream`: of trainer rank `rank`."""

    def _key(self, message: Message) -> int:
        return message_key(self.rank, message.peer, message.tag)


class ReceiveStaging(_Staging):
    """For `stream.receive_stream`: of engine rank `rank`."""

    def _key(self, message: Message) -> int:
        return message_key(message.peer, self.rank, message.tag)


def largest_message(messages: Sequence[Message]) -> int:
    """Bytes of the largest, the one with a pair's checksums included."""
    counts = Counter(message.peer for message in messages)
    return max([0, *(message.nbytes for message in messages), *(seal_bytes(count) for count in counts.values())])


def seal_bytes(messages: int) -> int:
    """Bytes of the message with the checksums of so many."""
    return DIGEST_BYTES * messages
