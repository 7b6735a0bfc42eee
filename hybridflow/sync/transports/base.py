"""What every transport offers: ordered messages between the senders and the receivers of one session.

A session joins the trainer ranks that hold something for one engine with that engine's ranks. It lives over many syncs,
belongs to no global process group, and is given up after any failure: the next sync opens another under a new name. A
payload is opaque bytes here; what is in it, its checksum and its place in a buffer are `sync.stream`'s.
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

# of the last message to a peer in a sync, which carries the checksums of the others; a bucket's number is smaller than
# 2^19
LAST_TAG = (1 << 31) - 1


@dataclass(frozen=True)
class Endpoint:
    """Where a session meets. Plain data: made by the trainer, read by the engine's ranks.

    Attributes:
        transport: name of an entry of `TRANSPORTS`.
        session: unique over the job; a new one after every failure.
        host, port: the store (`rendezvous`) at which both sides meet.
        senders: trainer ranks, ascending. receivers: engine ranks as the plan numbers them, ascending.
        message_bytes: of the largest message.
        timeout_s: longest wait for any one message.
        slots: messages of a pair of ranks that may be under way at a time, two or more.
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
        """From what `dataclasses.asdict` and JSON have made of one."""
        return cls(**{**data, "senders": tuple(data["senders"]), "receivers": tuple(data["receivers"])})


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the payload may be reused (sender) or read (receiver).

        Raises:
            WeightSyncError: the peer is gone, or the endpoint's `timeout_s` has passed; names session, peer, message
            and deadline.
        """


class _Done:
    def wait(self) -> None:
        """Nothing is left to do."""


DONE = _Done()  # the work of a payload that may be used again at once


class SendChannel(Protocol):
    """A trainer rank's end of a session. Messages to one peer arrive in the order in which they were sent."""

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Start sending `payload` to engine rank `peer`; it stays untouched until `wait`.

        `wait` of a message with `LAST_TAG` returns when the peer has it, of others perhaps before.
        """

    def close(self) -> None:
        """End the session in good order."""

    def abort(self) -> None:
        """Give the session up at once: no wait, pending work fails. Safe after any error, and twice."""


class ReceiveChannel(Protocol):
    """An engine rank's end."""

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """Start receiving from trainer rank `peer` into `into`, which belongs to the transport until `wait`."""

    def close(self) -> None:
        """End the session in good order."""

    def abort(self) -> None:
        """Give the session up at once. Safe after any error, and twice."""


@runtime_checkable
class LendingSendChannel(SendChannel, Protocol):
    """A sender whose messages can be written straight into memory that the receiver reads: into slot after slot, from
    the first again."""

    def rewind(self) -> None:
        """Begin with the first slot. Both ends call it before a sync, so that a message comes to lie in the same place
        in all of them."""

    def lend(self, peer: int, tag: int, nbytes: int) -> Payload:
        """Memory for the next message to `peer`, to be filled and handed to `send`; waits until it is free.

        The same object in every sync, as far as `rewind` is called.

        Raises:
            WeightSyncError: as `Work.wait`.
        """


class Loan(Protocol):
    """A message that can be read where it arrived."""

    @property
    def payload(self) -> Payload:
        """Valid until `release`; the same object in every sync, as far as `rewind` is called."""

    def release(self) -> None:
        """Let the sender use the memory again."""


@runtime_checkable
class LendingReceiveChannel(ReceiveChannel, Protocol):
    """A receiver whose messages can be read where they arrived."""

    @property
    def slots(self) -> int:
        """Messages of one peer that can be on loan at a time."""

    def rewind(self) -> None:
        """Begin with the first slot, as the sender does."""

    def borrow(self, peer: int, tag: int, nbytes: int) -> Loan:
        """Wait for the next message of `peer`.

        Raises:
            WeightSyncError: as `Work.wait`.
        """


@dataclass(frozen=True)
class Transport:
    """A way to bring messages from trainer ranks to the ranks of one engine, and where it runs.

    Attributes:
        open_sender, open_receiver: of endpoint, rank and device; block until all ranks of the session are there.
        devices: where the buffers may lie, "cpu" and "cuda".
        shares_devices: trainer and engines may be two processes of one GPU.
        one_host: trainer and engines must be on one host; else any placement will do.
        keeps_messages: a receiver that stages leaves all messages of a sync in the transport's slots.
        parts: a message has so many times the bytes that stay in a core's cache.
    """

    open_sender: Callable[[Endpoint, int, torch.device], SendChannel]
    open_receiver: Callable[[Endpoint, int, torch.device], ReceiveChannel]
    devices: tuple[str, ...] = ("cpu",)
    shares_devices: bool = False
    one_host: bool = False
    keeps_messages: bool = False
    parts: int = 1


TRANSPORTS: Registry[Transport] = Registry(TRANSPORT.kind, TRANSPORT.package, "rollout.sync.transport")
