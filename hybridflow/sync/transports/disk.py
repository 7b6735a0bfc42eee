"""Messages as files: where ranks share a folder and nothing else. A file is its payload, nothing is unpickled.

A message is written under a temporary name and renamed, so a reader sees it whole or not at all; the reader removes it.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.sync.meeting import Member, PeerWatch, both_ends, meet, refuse_device
from hybridflow.sync.payload import Payload
from hybridflow.sync.transports.base import TRANSPORTS, Transport, Work

_POLL_S, _LOOK_S = 0.002, 0.1


class Files:
    """Either end. The n-th message of a pair has n in its name, so one sync's files are not taken for the next
    one's."""

    def __init__(self, member: Member, device: torch.device) -> None:
        self.member, self.folder = member, Path(member.endpoint.folder)
        refuse_device(member, device, "use p2p")
        if not member.endpoint.folder or not self.folder.is_dir():
            raise WeightSyncError(
                f"the transport disk needs a folder that both sides see; {member.endpoint.folder!r} is none"
            )
        # a session's name may have any character, a file's may not
        self._session = "weights-" + hashlib.sha256(member.endpoint.session.encode()).hexdigest()[:16]
        meeting = meet(member)
        self.watches = {peer: PeerWatch(said) for peer, said in meeting.peers.items()}
        self._counts = dict.fromkeys(member.peers, 0)
        self._is_open = True

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Done when the receiver has removed the file: the folder holds what is under way, no more."""
        path = self._next(peer, tag)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                file.write(payload.memory)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            what = f"{path} cannot be written ({error}); make room or choose another folder"
            raise self.member.failure(peer, tag, what) from error
        return _Sent(self, peer, tag, path)

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """Start receiving into `into`."""
        return _Reading(self, peer, tag, self._next(peer, tag), into)

    def _next(self, peer: int, tag: int) -> Path:
        if not self._is_open:
            raise self.member.failure(peer, tag, "the session was given up before")
        number = self._counts[peer]
        self._counts[peer] += 1
        sender, receiver = (self.member.rank, peer) if self.member.side == "trainer" else (peer, self.member.rank)
        return self.folder / f"{self._session}-{sender}-{receiver}-{number}-{tag}.bin"

    def close(self) -> None:
        """End the session in good order."""
        self._is_open = False
        for watch in self.watches.values():
            watch.close()

    def abort(self) -> None:
        """Removes what this rank has sent or was to receive."""
        self.close()
        mine = f"{self.member.rank}-*" if self.member.side == "trainer" else f"*-{self.member.rank}-*-*"
        for path in self.folder.glob(f"{self._session}-{mine}"):
            path.unlink(missing_ok=True)


class _Sent:
    """A file that the peer is to take."""

    def __init__(self, files: Files, peer: int, tag: int, path: Path) -> None:
        self._files, self._peer, self._tag, self._path = files, peer, tag, path

    def wait(self) -> None:
        self._until(exists=False)

    def _until(self, exists: bool) -> None:
        member, watch = self._files.member, self._files.watches[self._peer]
        deadline, look = time.monotonic() + member.endpoint.timeout_s, 0.0
        while self._path.exists() != exists:
            now = time.monotonic()
            if now > deadline:
                raise member.late(self._peer, self._tag)
            if now > look:
                look = now + _LOOK_S
                if watch.has_ended() and self._path.exists() != exists:  # it may have done its part just before
                    raise member.lost(self._peer, self._tag)
            time.sleep(_POLL_S)


class _Reading(_Sent):
    """A file that the peer is to write."""

    def __init__(self, files: Files, peer: int, tag: int, path: Path, into: Payload) -> None:
        super().__init__(files, peer, tag, path)
        self._into = into

    def wait(self) -> None:
        self._until(exists=True)
        size = self._path.stat().st_size
        if size != self._into.nbytes:
            what = (
                f"{self._into.nbytes} bytes were expected, {self._path} has {size}; the two sides have different plans"
            )
            raise self._files.member.failure(self._peer, self._tag, what)
        with self._path.open("rb", buffering=0) as file:
            view, got = self._into.memory, 0
            while got < size:
                got += os.readv(file.fileno(), [view[got:]])
        with suppress(FileNotFoundError):
            self._path.unlink()


TRANSPORTS.register("disk", Transport(*both_ends(Files), needs_folder=True))
