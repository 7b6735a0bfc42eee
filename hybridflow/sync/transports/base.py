"""The transport interface: ordered messages between a session's senders and receivers.

A session connects the trainer ranks that hold weights for one engine with that engine's ranks. It
is reused over many syncs and does not belong to any global process group. After any failure it is
aborted, and the next sync opens another under a new name. Payloads are opaque bytes to a transport;
`sync.stream` handles their contents, checksums and positions in buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hybridflow.config.keys import TRANSPORT
from hybridflow.config.registry import Registry
from hybridflow.sync.payload import Payload

if TYPE_CHECKING:
    import torch

# Tag of the last message to a peer in a sync, the one with the checksums. Bucket indices are below
# 2^19.
LAST_TAG = (1 << 31) - 1


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


TRANSPORTS: Registry[Transport] = Registry(
    TRANSPORT.kind, TRANSPORT.package, "rollout.sync.transport"
)
