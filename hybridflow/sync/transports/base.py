"""The transport interface: ordered messages between a session's senders and receivers, their memory
and their checksums.

A session connects the trainer ranks that hold weights for one engine with that engine's ranks. It
is reused over many syncs and does not belong to any global process group. After any failure it is
aborted, and the next sync opens another under a new name. Payloads are opaque bytes to a transport;
`sync.stream` handles their contents, checksums and positions in buffers.

CPU payloads use xxh3, which runs at memory bandwidth. GPU payloads use a sum of mixed words,
computed on the device. Both ends of a session have payloads of the same kind, so they use the same
function. The seed encodes sender, receiver, tag and sync, so an intact message in the wrong place
is detected as well. The checksums protect against faults, not against attackers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash

from hybridflow.config.keys import TRANSPORT
from hybridflow.config.registry import Registry
from hybridflow.device.residency import memory_of
from hybridflow_kernels.digest import digest as device_digest

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 8
Digest = int | torch.Tensor  # an int for a CPU payload; int64 `[1]` on the device for a GPU payload
# Tag of the last message to a peer in a sync, the one with the checksums. Bucket indices are below
# 2^19.
LAST_TAG = (1 << 31) - 1
TRANSPORTS: Registry[Transport] = Registry(
    TRANSPORT.kind, TRANSPORT.package, "rollout.sync.transport"
)


class Payload:
    """Memory from which a message is sent or into which it is received. Created once and reused in
    every sync of a session.

    Attributes:
        tensor: uint8 `[n]`, contiguous.
        nbytes: n.
        on_host: True if it is CPU memory.
        memory: writable view of the same bytes, valid while the tensor exists; empty on a GPU.
    """

    __slots__ = ("memory", "nbytes", "on_host", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.on_host = tensor.is_cpu
        # a payload may be a parameter that is offloaded between two syncs
        self.memory = memory_of(tensor) if tensor.is_cpu else memoryview(b"")


def message_key(sender: int, receiver: int, tag: int) -> int:
    """Return a 64-bit key that is unique among the messages of a sync."""
    return xxhash.xxh3_64_intdigest(struct.pack("<3q", sender, receiver, tag))


def seeds_of(keys: Sequence[int], sync: int) -> list[int]:
    """Return a 64-bit seed per message of a sync, distinct from the seeds of other syncs."""
    mask = xxhash.xxh3_64_intdigest(struct.pack("<q", sync))
    return [key ^ mask for key in keys]


def digest(payload: Payload, seed: int) -> Digest:
    """Return the checksum of a payload. On a GPU this does not synchronise."""
    return (
        xxhash.xxh3_64_intdigest(payload.memory, seed)
        if payload.on_host
        else device_digest(payload.tensor, seed)
    )


def joined(digests: Sequence[Digest], device: torch.device) -> torch.Tensor:
    """Concatenate checksums as bytes, uint8 `[8 * n]` on the payloads' device."""
    if device.type == "cpu":
        words = torch.from_numpy(np.array(digests, dtype=np.uint64).view(np.int64))
    else:
        words = torch.cat([word for word in digests if isinstance(word, torch.Tensor)])
    return words.view(torch.uint8)


def first_difference(digests: Sequence[Digest], sent: torch.Tensor) -> int | None:
    """Return the index of the first checksum that differs from `sent`, or None if all are equal.

    `sent` is the `joined` result of the other end.
    """
    wrong = (joined(digests, sent.device).view(torch.int64) != sent.view(torch.int64)).nonzero()
    return int(wrong[0]) if len(wrong) else None


@dataclass(frozen=True)
class Endpoint:
    """Configuration of a session. Plain data, created by the trainer and read by the engine's
    ranks.

    Attributes:
        transport: name of an entry in `TRANSPORTS`.
        session: unique within the job; a new one after every failure.
        host, port: address of the store (`rendezvous`) through which both sides connect.
        senders: trainer ranks, in ascending order.
        receivers: engine ranks as numbered in the plan, in ascending order.
        message_bytes: size of the largest message.
        timeout_s: maximum wait for each message.
        slots: maximum messages in flight per pair of ranks, at least 2.
    """

    transport: str
    session: str
    host: str
    port: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    message_bytes: int
    timeout_s: float
    slots: int = 2

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Endpoint:
        """Rebuild an endpoint from `dataclasses.asdict` after a JSON round trip."""
        return cls(
            **{**data, "senders": tuple(data["senders"]), "receivers": tuple(data["receivers"])}
        )


class Work(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Wait until the sender may reuse the payload, or the receiver may read it.

        Raises:
            WeightSyncError: the peer is lost, or the endpoint's `timeout_s` has passed. The message
                names the session, peer, message and deadline.
        """


class _Done:
    def wait(self) -> None:
        """Return immediately."""


DONE = _Done()  # the `Work` of a payload that may be reused immediately


class SendChannel(Protocol):
    """A trainer rank's end of a session. Messages to one peer arrive in the order in which they
    were sent."""

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Start sending `payload` to engine rank `peer`. The payload must not be modified until
        `wait` returns.

        With `LAST_TAG`, `wait` returns only after the peer has received the message; otherwise it
        may return earlier.
        """

    def close(self) -> None:
        """Close the session cleanly."""

    def abort(self) -> None:
        """Abort the session without waiting; pending work fails. Safe after any error, and
        idempotent."""


class ReceiveChannel(Protocol):
    """An engine rank's end of a session."""

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """Start receiving from trainer rank `peer` into `into`, which the transport owns until
        `wait` returns."""

    def close(self) -> None:
        """Close the session cleanly."""

    def abort(self) -> None:
        """Abort the session without waiting. Safe after any error, and idempotent."""


@runtime_checkable
class LendingSendChannel(SendChannel, Protocol):
    """A send channel whose messages are written directly into memory that the receiver reads.

    The memory consists of slots that are used in rotation.
    """

    def rewind(self) -> None:
        """Restart at the first slot.

        Both ends call it before a sync, so that a message uses the same slot in every sync.
        """

    def lend(self, peer: int, tag: int, nbytes: int) -> Payload:
        """Wait for free memory for the next message to `peer` and return it. The caller fills it
        and passes it to `send`.

        Returns the same object in every sync if `rewind` is called before each.

        Raises:
            WeightSyncError: in the same cases as `Work.wait`.
        """


class Loan(Protocol):
    """A received message that is read in the transport's memory, without a copy."""

    @property
    def payload(self) -> Payload:
        """The message, valid until `release`. It is the same object in every sync if `rewind` is
        called before each."""

    def release(self) -> None:
        """Return the memory to the sender."""


@runtime_checkable
class LendingReceiveChannel(ReceiveChannel, Protocol):
    """A receive channel whose messages can be read in the transport's memory, without a copy."""

    @property
    def slots(self) -> int:
        """Number of messages per peer that can be borrowed at the same time."""

    def rewind(self) -> None:
        """Restart at the first slot, as the sender does."""

    def borrow(self, peer: int, tag: int, nbytes: int) -> Loan:
        """Wait for the next message from `peer`.

        Raises:
            WeightSyncError: in the same cases as `Work.wait`.
        """


@dataclass(frozen=True)
class Transport:
    """A way to carry messages from trainer ranks to the ranks of one engine, and the placements
    that support it.

    Attributes:
        open_sender, open_receiver: called with endpoint, rank and device; block until all ranks of
            the session have arrived.
        devices: supported buffer devices, "cpu" and "cuda".
        shares_devices: True if trainer and engines may be two processes on one GPU.
        one_host: True if trainer and engines must be on one host; False allows any placement.
        keeps_messages: True if a receiver that stages leaves all messages of a sync in the
            transport's slots.
        parts: message size as a multiple of the bytes that stay in a core's cache.
    """

    open_sender: Callable[[Endpoint, int, torch.device], SendChannel]
    open_receiver: Callable[[Endpoint, int, torch.device], ReceiveChannel]
    devices: tuple[str, ...] = ("cpu",)
    shares_devices: bool = False
    one_host: bool = False
    keeps_messages: bool = False
    parts: int = 1
