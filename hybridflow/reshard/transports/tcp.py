"""Messages over one TCP connection for each pair of ranks: CPU buffers, any placement, no thread and no copy of ours.

`send` returns when the kernel has the bytes, so the payload may be used again. The receiver acknowledges the first of every `slots`
messages and the last of a sync: who sends learns of a receiver that died or stands still. (An answer to each message of 1 MiB costs a
tenth of copying it.) Over the same kernel gloo has a thread in every rank, and asks the receiver before each message.

A receiver listens where the trainer's store can be reached from, on loopback when that is where the store is. Its port and a key of its own
are said through the store; a connection that does not begin with the key is closed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections import deque
from contextlib import ExitStack, suppress

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.reshard.host_memory import bytes_of
from hybridflow.reshard.transports.base import DONE, LAST_TAG, Endpoint, Work
from hybridflow.reshard.transports.meeting import Meeting, Peers, Seat, meet, refuse_device

_KEY_BYTES = 32
_HELLO = struct.Struct(f"<{_KEY_BYTES}sq")  # key, trainer rank
_HEADER = struct.Struct("<qq")  # tag, bytes of the payload
_TAKEN = struct.Struct("<q")  # tag
_HELLO_S = 5.0  # a stranger that says nothing holds the others up no longer


def open_sender(endpoint: Endpoint, rank: int, device: torch.device) -> Connections:
    """See `transports.open_sender`."""
    seat = Seat(endpoint, "trainer", rank)
    refuse_device(seat, device, "use p2p")
    deadline = time.monotonic() + endpoint.timeout_s
    meeting = meet(seat)
    with ExitStack() as on_error:
        links = {}
        for peer, said in meeting.peers.items():
            try:
                link = socket.create_connection((said["host"], said["port"]), timeout=max(deadline - time.monotonic(), 0.001))
                on_error.callback(link.close)
                link.sendall(_HELLO.pack(bytes.fromhex(said["key"]), rank))
            except OSError as error:
                raise seat.failure(peer, 0, f"it cannot be reached at {said['host']}:{said['port']} ({error})") from error
            links[peer] = link
        on_error.pop_all()
    return Connections(seat, meeting, links)


def open_receiver(endpoint: Endpoint, rank: int, device: torch.device) -> Connections:
    """See `transports.open_receiver`."""
    seat = Seat(endpoint, "engine", rank)
    refuse_device(seat, device, "use p2p")
    deadline = time.monotonic() + endpoint.timeout_s
    host, key = _own_address(endpoint), secrets.token_bytes(_KEY_BYTES)
    with socket.create_server((host, 0), backlog=len(seat.peers) + 8) as listener:
        meeting = meet(seat, host=host, port=listener.getsockname()[1], key=key.hex())
        return Connections(seat, meeting, _accept_all(seat, listener, key, deadline))


class Connections:
    """Either end."""

    def __init__(self, seat: Seat, meeting: Meeting, links: dict[int, socket.socket]) -> None:
        self.seat, self.peers = seat, Peers(seat, meeting)
        self._links = links
        self._pending: dict[int, deque[_Sent | _Arrival]] = {peer: deque() for peer in links}  # in order
        self._counts = dict.fromkeys(links, 0)
        for link in links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # deadlines of the kernel's: Python's own ask before each call whether it would wait, and cannot wait for all of a message
            link.settimeout(None)
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                link.setsockopt(socket.SOL_SOCKET, direction, _timeval(seat.endpoint.timeout_s))

    def send(self, peer: int, tag: int, payload: torch.Tensor) -> Work:
        """See `SendChannel.send`."""
        self._write(peer, tag, _HEADER.pack(tag, payload.numel()), bytes_of(payload))
        if not self._is_acknowledged(peer, tag):
            return DONE  # the kernel has all of it
        sent = _Sent(self, peer, tag)
        self._pending[peer].append(sent)
        return sent

    def receive(self, peer: int, tag: int, into: torch.Tensor) -> Work:
        """See `ReceiveChannel.receive`. What has not come by then is read by `wait`."""
        self.link(peer, tag)
        arrival = _Arrival(self, peer, tag, into, self._is_acknowledged(peer, tag))
        self._pending[peer].append(arrival)
        return arrival

    def acknowledge(self, peer: int, tag: int) -> None:
        """Say that a message has been read."""
        self._write(peer, tag, _TAKEN.pack(tag))

    def _is_acknowledged(self, peer: int, tag: int) -> bool:
        """Of the next message; both ends count alike."""
        self._counts[peer] += 1
        return self._counts[peer] % self.seat.endpoint.slots == 1 or tag == LAST_TAG

    def _write(self, peer: int, tag: int, *parts: bytes | memoryview) -> None:
        link = self.link(peer, tag)
        try:
            count = link.sendmsg(parts)
            if count < sum(map(len, parts)):  # a signal came
                link.sendall(b"".join(parts)[count:])
        except OSError as error:
            raise self.problem(peer, tag, error) from error

    def finish(self, work: _Sent | _Arrival) -> None:
        """Read what a peer still owes for transfers before this one, and then for this."""
        pending = self._pending[work.peer]
        while not work.is_done:
            pending[0].read()
            pending.popleft()

    def read(self, peer: int, tag: int, into: bytearray | memoryview) -> None:
        """Read just so many bytes."""
        link, size = self.link(peer, tag), len(into)
        try:
            count = link.recv_into(into, size, socket.MSG_WAITALL)
            while 0 < count < size:  # a signal came
                more = link.recv_into(memoryview(into)[count:], 0, socket.MSG_WAITALL)
                count = count + more if more else 0
        except OSError as error:
            raise self.problem(peer, tag, error) from error
        if not count and size:
            raise self.problem(peer, tag, ConnectionResetError("it has closed the connection"))

    def link(self, peer: int, tag: int) -> socket.socket:
        """The connection with a peer."""
        if peer not in self._links:
            raise self.seat.failure(peer, tag, "the session was given up before, or has no such rank")
        return self._links[peer]

    def problem(self, peer: int, tag: int, error: OSError) -> WeightSyncError:
        """The error for a connection that broke or stands still."""
        if peer not in self._links:
            return self.seat.failure(peer, tag, "the session was given up meanwhile")
        if isinstance(error, (TimeoutError, BlockingIOError)):
            return self.seat.late(peer, tag)
        return self.peers.lost(peer, tag, str(error) or type(error).__name__)

    def close(self) -> None:
        """See `SendChannel.close`. What was sent still arrives."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
        self.peers.forget()

    def abort(self) -> None:
        """See `SendChannel.abort`."""
        links, self._links = self._links, {}
        for link in links.values():
            with suppress(OSError):  # it may be broken already
                link.shutdown(socket.SHUT_RDWR)  # wakes another thread that waits for it, which closing does not
            link.close()
        self.peers.forget()


class _Transfer:
    def __init__(self, channel: Connections, peer: int, tag: int) -> None:
        self.channel, self.peer, self.tag, self.is_done = channel, peer, tag, False

    def expect(self, form: struct.Struct, *wanted: int) -> None:
        """Read a header that must have these numbers."""
        header = bytearray(form.size)
        self.channel.read(self.peer, self.tag, header)
        if (found := form.unpack(header)) != wanted:
            what = f"message and bytes {list(wanted)} were expected, {list(found)} came; the two sides have different plans"
            raise self.channel.seat.failure(self.peer, self.tag, what)


class _Sent(_Transfer):
    def wait(self) -> None:
        """See `Work.wait`."""
        self.channel.finish(self)

    def read(self) -> None:
        """That it was taken."""
        self.expect(_TAKEN, self.tag)
        self.is_done = True


class _Arrival(_Transfer):
    def __init__(self, channel: Connections, peer: int, tag: int, into: torch.Tensor, is_acknowledged: bool) -> None:
        super().__init__(channel, peer, tag)
        self._into, self._is_acknowledged = into, is_acknowledged

    def wait(self) -> None:
        """See `Work.wait`."""
        self.channel.finish(self)

    def read(self) -> None:
        """Header and payload."""
        channel = self.channel
        self.expect(_HEADER, self.tag, self._into.numel())
        channel.read(self.peer, self.tag, bytes_of(self._into))
        if self._is_acknowledged:
            channel.acknowledge(self.peer, self.tag)
        self.is_done = True


def _timeval(seconds: float) -> bytes:
    """C's struct timeval: seconds and microseconds."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _accept_all(seat: Seat, listener: socket.socket, key: bytes, deadline: float) -> dict[int, socket.socket]:
    """One connection from each sender, by its rank."""
    links: dict[int, socket.socket] = {}
    with ExitStack() as on_error:
        while missing := [peer for peer in seat.peers if peer not in links]:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                link, _ = listener.accept()
            except TimeoutError as error:
                raise seat.failure(missing[0], 0, f"no connection came from trainer ranks {missing}") from error
            rank = _greeted(link, key, min(_HELLO_S, max(deadline - time.monotonic(), 0.001)))
            if rank in missing:
                links[rank] = link
                on_error.callback(link.close)
            else:
                link.close()
        on_error.pop_all()
    return links


def _greeted(link: socket.socket, key: bytes, within_s: float) -> int:
    """The rank that the other end says it is; -1 for a stranger."""
    link.settimeout(within_s)
    try:
        hello = link.recv(_HELLO.size, socket.MSG_WAITALL)
        while 0 < len(hello) < _HELLO.size and (more := link.recv(_HELLO.size - len(hello))):
            hello += more
    except OSError:
        return -1
    if len(hello) != _HELLO.size:
        return -1
    said, rank = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(said, key) else -1


def _own_address(endpoint: Endpoint) -> str:
    """Of this machine, as the store's machine sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((endpoint.host, endpoint.port))  # sends nothing: asks for the route
        return str(probe.getsockname()[0])
