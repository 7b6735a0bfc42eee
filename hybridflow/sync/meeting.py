"""Rendezvous of a session's ranks, and detection of dead peers.

Every rank announces itself and its process in the store under the session's name. Ranks on the same
kernel can then watch each other's processes. For ranks elsewhere, only broken sockets and deadlines
reveal a failure.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.errors import WeightSyncError
from hybridflow.process.rendezvous import client_store
from hybridflow.process.store import Keys, StoreClient, StoreError, StoreLate
from hybridflow.sync.transports.base import Endpoint

if TYPE_CHECKING:
    import torch

OpenEnd = Callable[[Endpoint, int, "torch.device"], Any]
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Member:
    """A rank of a session: its endpoint, side ("trainer" or "engine") and rank number."""

    endpoint: Endpoint
    side: str
    rank: int

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of the other side."""
        return self.endpoint.receivers if self.side == "trainer" else self.endpoint.senders

    @property
    def peer_side(self) -> str:
        """Name of the other side."""
        return "engine" if self.side == "trainer" else "trainer"

    def failure(self, peer: int, tag: int, what: str) -> WeightSyncError:
        """Build an error that names the session, both ranks, the message and the deadline."""
        return WeightSyncError(
            f"session {self.endpoint.session}: {self.side} rank {self.rank}, message {tag} with "
            f"{self.peer_side} rank {peer} over {self.endpoint.transport}: {what} (deadline "
            f"{self.endpoint.timeout_s:g} s); abort the session and retry the sync"
        )

    def late(self, peer: int, tag: int) -> WeightSyncError:
        """Build the error for a peer that is connected but unresponsive."""
        return self.failure(
            peer, tag, f"the peer made no progress for {self.endpoint.timeout_s:g} s"
        )

    def lost(self, peer: int, tag: int, why: str = "its process has ended") -> WeightSyncError:
        """Build the error for a peer that died."""
        return self.failure(peer, tag, f"the peer is gone: {why}")


def both_ends(open_end: Callable[[Member, torch.device], Any]) -> tuple[OpenEnd, OpenEnd]:
    """Return `open_sender` and `open_receiver` for a `Transport` that opens both ends with
    `open_end`."""

    def opened_as(side: str) -> OpenEnd:
        return lambda endpoint, rank, device: open_end(Member(endpoint, side, rank), device)

    return opened_as("trainer"), opened_as("engine")


def refuse_device(member: Member, device: torch.device, instead: str) -> None:
    """Raise WeightSyncError unless the buffers are on the CPU. The message ends with `instead`, the
    suggested remedy."""
    if device.type != "cpu":
        raise WeightSyncError(
            f"transport {member.endpoint.transport} requires CPU buffers, but the buffers of "
            f"{member.side} rank {member.rank} are on {device}; {instead}"
        )


@dataclass(frozen=True)
class Meeting:
    """A session whose ranks have all arrived.

    Attributes:
        store: the store, with keys prefixed by the session's name.
        peers: announcements of the other side's ranks, keyed by rank.
    """

    store: Keys
    peers: dict[int, dict[str, Any]]


def meet(member: Member, **said: Any) -> Meeting:
    """Announce this rank with the JSON-able values `said`, and wait for the announcements of all
    ranks on both sides.

    Raises:
        WeightSyncError: the store cannot be reached, or a rank has not arrived within the
            endpoint's `timeout_s`. The message names the missing ranks.
    """
    endpoint = member.endpoint
    deadline = time.monotonic() + member.endpoint.timeout_s
    store = Keys(_store(endpoint, deadline).connection, f"transport/{endpoint.session}/")
    ranks = [("trainer", rank) for rank in endpoint.senders] + [
        ("engine", rank) for rank in endpoint.receivers
    ]
    keys = [f"{side}/{rank}" for side, rank in ranks]
    try:
        store.set(
            f"{member.side}/{member.rank}",
            json.dumps({"process": os.getpid(), "kernel": _kernel(), **said}),
        )
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        found = {rank: json.loads(store.get(f"{member.peer_side}/{rank}")) for rank in member.peers}
    except StoreLate as error:
        missing = [" rank ".join(key.split("/")[-2:]) for key in error.missing]
        raise WeightSyncError(
            f"session {endpoint.session}, {member.side} rank {member.rank}: {', '.join(missing)} "
            f"did not arrive within {endpoint.timeout_s:g} s; see the logs of those ranks"
        ) from error
    except StoreError as error:
        raise WeightSyncError(
            f"session {endpoint.session}, {member.side} rank {member.rank}: {error}; see the log "
            "of the process that runs the store"
        ) from error
    return Meeting(store, found)


def _store(endpoint: Endpoint, deadline: float) -> StoreClient:
    try:
        return client_store(endpoint.host, endpoint.port, max(deadline - time.monotonic(), 0.1))
    except RuntimeError as error:
        raise WeightSyncError(
            f"session {endpoint.session}: could not reach the store at "
            f"{endpoint.host}:{endpoint.port} within {endpoint.timeout_s:g} s ({error}); check "
            "that the trainer is running"
        ) from error


def _kernel() -> str:
    """Return an id that is equal for all processes in the same PID namespace of the same boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
        "/proc/self/ns/pid"
    )


class PeerWatch:
    """Detects the exit of a peer's process. A peer on another kernel cannot be watched."""

    def __init__(self, peer: dict[str, Any]) -> None:
        self.is_local = peer["kernel"] == _kernel()
        # pidfd, readable once the process has exited; -1 if it is not watched
        self.fd = -1
        self._ended = False
        if self.is_local:
            try:
                self.fd = os.pidfd_open(peer["process"])
            except ProcessLookupError:
                self._ended = True

    def has_ended(self) -> bool:
        """Return True if the process is known to have exited. Thread-safe, even if `close` runs
        concurrently."""
        # a new poll object per call, because two threads cannot wait on the same one
        poll = select.poll()
        fd = self.fd
        if fd >= 0:
            poll.register(fd, select.POLLIN)
        return self._ended or any(event & select.POLLIN for _, event in poll.poll(0))

    def close(self) -> None:
        """Stop watching the process."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)


class Peers:
    """Monitors the peer processes of a session, and builds the error if a peer is lost."""

    def __init__(self, member: Member, meeting: Meeting) -> None:
        self._member = member
        self._watches = {rank: PeerWatch(said) for rank, said in meeting.peers.items()}

    def lost(self, peer: int, tag: int, reason: str) -> WeightSyncError:
        """Build the error for a broken connection. It names the rank whose process has exited, if
        known.

        A connection also breaks if the peer aborted the session because a third rank died, so all
        peers are checked.
        """
        if (ended := self.ended()) and peer not in ended:
            names = ", ".join(f"{self._member.peer_side} rank {rank}" for rank in ended)
            return self._member.failure(
                peer, tag, f"session aborted because the process of {names} has ended"
            )
        return self._member.lost(peer, tag) if ended else self._member.lost(peer, tag, reason)

    def ended(self) -> list[int]:
        """Return the local peers whose process has exited.

        Waits briefly, because a process closes its connections shortly before its exit is visible.
        """
        deadline = time.monotonic() + _SETTLE_S
        while not (ended := self.ended_now()) and time.monotonic() < deadline:
            time.sleep(_SETTLE_S / 20)
        return ended

    def ended_now(self) -> list[int]:
        """Same as `ended`, but without waiting."""
        ended: list[int] = []
        for rank, watch in self._watches.items():
            if watch.has_ended():
                ended.append(rank)
        return ended

    def forget(self) -> None:
        """Stop watching all processes."""
        watches = self._watches
        self._watches = {}
        for watch in watches.values():
            watch.close()
