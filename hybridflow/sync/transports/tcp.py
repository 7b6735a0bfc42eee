"""Message transport over one TCP connection per pair of ranks, for CPU buffers and any placement,
without extra threads or copies.

`send` returns once the kernel has buffered the bytes, so the payload may be reused. The receiver
acknowledges the first of every `slots` messages and the last of a sync, so that the sender detects
a dead or stalled receiver. (Acknowledging every 1 MiB message would cost a tenth of copying it.)
For comparison, gloo uses a thread in every rank and performs a handshake with the receiver before
each message.

A receiver listens on the interface that routes to the trainer's store (loopback if the store is
there) and publishes its port through the store. Both ends of a connection prove that they know the
job's secret before any message is sent.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import NoReturn

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.process.secret import Lobby, greet, greet_client
from hybridflow.sync.meeting import Meeting, Member, Peers, meet, refuse_device
from hybridflow.sync.transports.base import (
    DONE,
    LAST_TAG,
    TRANSPORTS,
    Endpoint,
    Payload,
    Transport,
    Work,
)

_RANK = struct.Struct("<q")  # the trainer rank that opened the connection
_HEADER = struct.Struct("<qq")  # tag, payload bytes
_TAKEN = struct.Struct("<q")  # tag
_HELLO_S = 5.0  # limit for the whole greeting
_TRIES = 5
_PAUSE_S = 0.05
_BACKLOG = 1024  # peers, plus unknown clients that connect before all ranks have arrived


def open_sender(endpoint: Endpoint, rank: int, device: torch.device) -> Connections:
    """Open trainer rank `rank`'s end of the session."""
    member = Member(endpoint, "trainer", rank)
    refuse_device(member, device, "use p2p")
    deadline = time.monotonic() + endpoint.timeout_s
    meeting = meet(member)
    with ExitStack() as on_error:
        links = {}
        for peer, said in meeting.peers.items():
            try:
                links[peer] = _connected(
                    (said["host"], said["port"]), rank, _purpose(member, rank, peer), deadline
                )
            except OSError as error:
                what = f"could not reach it at {said['host']}:{said['port']} ({error})"
                raise member.failure(peer, 0, what) from error
            on_error.callback(links[peer].close)
        on_error.pop_all()
    return Connections(member, meeting, links)


def open_receiver(endpoint: Endpoint, rank: int, device: torch.device) -> Connections:
    """Open engine rank `rank`'s end of the session."""
    member = Member(endpoint, "engine", rank)
    refuse_device(member, device, "use p2p")
    deadline = time.monotonic() + endpoint.timeout_s
    host = _own_address(endpoint)
    with socket.create_server((host, 0), backlog=_BACKLOG) as listener:
        meeting = meet(member, host=host, port=listener.getsockname()[1])
        return Connections(member, meeting, _accept_all(member, listener, deadline))


class _Link:
    """The connection to one peer."""

    __slots__ = ("count", "pending", "socket")

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.socket = connection
        self.pending: deque[_Transfer] = deque()  # pending reads, in order
        self.count = 0  # messages sent or requested
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Use the kernel's timeouts. Python's would poll before each call, and cannot wait for a
        # whole message.
        connection.settimeout(None)
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, direction, _timeval(timeout_s))


class Connections:
    """Either end of a session.

    The number of calls per message is kept minimal: 1 MiB of message data evicts the interpreter
    from the cache, so the code of every call must be fetched from memory again.
    """

    def __init__(
        self, member: Member, meeting: Meeting, connections: dict[int, socket.socket]
    ) -> None:
        self.member = member
        self.peers = Peers(member, meeting)
        self._links = {
            peer: _Link(connection, member.endpoint.timeout_s)
            for peer, connection in connections.items()
        }

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        """Start sending. The payload must not be modified until `wait` returns."""
        link = self._links.get(peer) or self._no_link(peer, tag)
        self._write(
            link,
            peer,
            tag,
            (_HEADER.pack(tag, payload.nbytes), payload.memory),
            _HEADER.size + payload.nbytes,
        )
        if not self._is_acknowledged(link, tag):
            return DONE  # the kernel has all bytes
        sent = _Sent(self, link, peer, tag)
        link.pending.append(sent)
        return sent

    def receive(self, peer: int, tag: int, into: Payload) -> Work:
        """Register a receive. The data is read by `wait`."""
        link = self._links.get(peer) or self._no_link(peer, tag)
        arrival = _Arrival(self, link, peer, tag, into, self._is_acknowledged(link, tag))
        link.pending.append(arrival)
        return arrival

    def acknowledge(self, link: _Link, peer: int, tag: int) -> None:
        """Acknowledge that a message has been read."""
        self._write(link, peer, tag, (_TAKEN.pack(tag),), _TAKEN.size)

    def _is_acknowledged(self, link: _Link, tag: int) -> bool:
        """Return True if the receiver acknowledges the next message. Sender and receiver count
        messages identically."""
        link.count += 1
        return link.count % self.member.endpoint.slots == 1 or tag == LAST_TAG

    def _write(
        self, link: _Link, peer: int, tag: int, parts: Sequence[bytes | memoryview], size: int
    ) -> None:
        try:
            count = link.socket.sendmsg(parts)
            if count < size:  # interrupted by a signal
                link.socket.sendall(b"".join(parts)[count:])
        except OSError as error:
            raise self._problem(peer, tag, error) from error

    def read(
        self, link: _Link, peer: int, tag: int, into: bytearray | memoryview, size: int
    ) -> None:
        """Read exactly `size` bytes."""
        try:
            count = link.socket.recv_into(into, size, socket.MSG_WAITALL)
            while 0 < count < size:  # interrupted by a signal
                more = link.socket.recv_into(memoryview(into)[count:], 0, socket.MSG_WAITALL)
                count = count + more if more else 0
        except OSError as error:
            raise self._problem(peer, tag, error) from error
        if not count and size:
            raise self._problem(peer, tag, ConnectionResetError("it has closed the connection"))

    def _no_link(self, peer: int, tag: int) -> NoReturn:
        raise self.member.failure(peer, tag, "the session was already aborted, or has no such rank")

    def _problem(self, peer: int, tag: int, error: OSError) -> WeightSyncError:
        """Build the error for a broken or stalled connection."""
        if peer not in self._links:
            return self.member.failure(peer, tag, "the session was aborted meanwhile")
        if isinstance(error, (TimeoutError, BlockingIOError)):
            return self.member.late(peer, tag)
        return self.peers.lost(peer, tag, str(error) or type(error).__name__)

    def close(self) -> None:
        """Close the connections. Data already sent still arrives."""
        links = self._links
        self._links = {}
        for link in links.values():
            link.socket.close()
        self.peers.forget()

    def abort(self) -> None:
        """Abort the session without waiting."""
        links = self._links
        self._links = {}
        for link in links.values():
            with suppress(OSError):  # the connection may be broken already
                # wakes other threads blocked on the socket; close does not
                link.socket.shutdown(socket.SHUT_RDWR)
            link.socket.close()
        self.peers.forget()


class _Transfer:
    """A pending read from a peer."""

    __slots__ = ("channel", "is_done", "link", "peer", "tag")

    def __init__(self, channel: Connections, link: _Link, peer: int, tag: int) -> None:
        self.channel = channel
        self.link = link
        self.peer = peer
        self.tag = tag
        self.is_done = False

    def wait(self) -> None:
        """Complete all earlier reads from the peer, then this one."""
        pending = self.link.pending
        while not self.is_done:
            pending[0].read()
            pending.popleft()

    def read(self) -> None:
        """Read this transfer's data."""
        raise NotImplementedError

    def expect(self, form: struct.Struct, *wanted: int) -> None:
        """Read a header and check that it contains `wanted`."""
        header = bytearray(form.size)
        self.channel.read(self.link, self.peer, self.tag, header, form.size)
        if (found := form.unpack(header)) != wanted:
            what = (
                f"expected message and bytes {list(wanted)}, got {list(found)}; the two sides have "
                "different plans"
            )
            raise self.channel.member.failure(self.peer, self.tag, what)


class _Sent(_Transfer):
    __slots__ = ()

    def read(self) -> None:
        """Read the acknowledgement."""
        self.expect(_TAKEN, self.tag)
        self.is_done = True


class _Arrival(_Transfer):
    __slots__ = ("_into", "_is_acknowledged")

    def __init__(
        self,
        channel: Connections,
        link: _Link,
        peer: int,
        tag: int,
        into: Payload,
        is_acknowledged: bool,
    ) -> None:
        super().__init__(channel, link, peer, tag)
        self._into = into
        self._is_acknowledged = is_acknowledged

    def read(self) -> None:
        """Read the header and the payload."""
        channel = self.channel
        link = self.link
        into = self._into
        self.expect(_HEADER, self.tag, into.nbytes)
        channel.read(link, self.peer, self.tag, into.memory, into.nbytes)
        if self._is_acknowledged:
            channel.acknowledge(link, self.peer, self.tag)
        self.is_done = True


def _timeval(seconds: float) -> bytes:
    """Pack a C struct timeval: seconds and microseconds."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _connected(where: tuple[str, int], rank: int, purpose: str, deadline: float) -> socket.socket:
    """Connect and verify the other end.

    Retries a few times if the connection is closed during the handshake, which happens when too
    many unknown clients connect.
    """
    for tries_left in reversed(range(_TRIES)):
        left = max(deadline - time.monotonic(), 0.001)
        with ExitStack() as on_error:
            link = on_error.enter_context(socket.create_connection(where, timeout=left))
            try:
                link.sendall(_RANK.pack(rank))
                if greet(link, purpose, left) is None:
                    raise ConnectionRefusedError(
                        "the listener could not prove that it knows the job's secret"
                    )
            except (ConnectionResetError, BrokenPipeError):
                if not tries_left:
                    raise
                continue
            on_error.pop_all()
            return link
    raise AssertionError("unreachable")


def _accept_all(
    member: Member, listener: socket.socket, deadline: float
) -> dict[int, socket.socket]:
    """Accept one connection from each sender. Returns the connections, keyed by rank."""
    if not member.peers:
        return {}
    with ThreadPoolExecutor(1) as own:  # a thread, because the caller may be running an event loop
        return own.submit(asyncio.run, _Greeter(member, listener).links(deadline)).result()


class _Greeter:
    """Performs the handshake with all clients concurrently, each within `_HELLO_S` seconds, so that
    an unknown client cannot delay a rank."""

    def __init__(self, member: Member, listener: socket.socket) -> None:
        self._member = member
        self._listener = listener
        self._missing = set(member.peers)
        self._links = dict[int, socket.socket]()
        self._lobby = Lobby()
        self._tasks = set[asyncio.Task[None]]()
        self._are_here = asyncio.Event()

    async def links(self, deadline: float) -> dict[int, socket.socket]:
        """Return the connections, keyed by rank. Raises WeightSyncError at the deadline."""
        self._listener.setblocking(False)
        accepting = asyncio.create_task(self._accept())
        try:
            await asyncio.wait_for(self._are_here.wait(), max(deadline - time.monotonic(), 0.001))
        except TimeoutError as error:
            for link in self._links.values():
                link.close()
            missing = sorted(self._missing)
            what = f"trainer ranks {missing} did not connect"
            raise self._member.failure(missing[0], 0, what) from error
        finally:
            for task in (accepting, *self._tasks):
                task.cancel()
            await asyncio.gather(accepting, *self._tasks, return_exceptions=True)
        return self._links

    async def _accept(self) -> None:
        while True:
            try:
                link, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:
                # the client has disconnected, or no file descriptor is free until others are closed
                await asyncio.sleep(_PAUSE_S)
                continue
            task = asyncio.create_task(self._greet(link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _greet(self, link: socket.socket) -> None:
        link.setblocking(False)
        rank = -1
        try:
            mine = asyncio.current_task()
            assert mine is not None
            with self._lobby.place(mine.cancel):
                rank = await asyncio.wait_for(self._rank(link), _HELLO_S)
        except (OSError, TimeoutError):
            return  # an unknown client
        finally:
            if rank in self._missing:
                self._missing.remove(rank)
                self._links[rank] = link
            else:
                link.close()
            if not self._missing:
                self._are_here.set()

    async def _rank(self, link: socket.socket) -> int:
        """Return the rank of the client, or -1 if the client could not prove that it belongs to the
        job."""
        loop = asyncio.get_running_loop()

        async def read(size: int) -> bytes:
            data = b""
            while len(data) < size:
                part = await loop.sock_recv(link, size - len(data))
                if not part:
                    raise ConnectionResetError("the peer closed the connection")
                data += part
            return data

        async def write(data: bytes) -> None:
            await loop.sock_sendall(link, data)

        rank = int(_RANK.unpack(await read(_RANK.size))[0])
        return (
            rank
            if await greet_client(read, write, _purpose(self._member, rank, self._member.rank))
            else -1
        )


def _purpose(member: Member, sender: int, receiver: int) -> str:
    return f"tcp/{member.endpoint.session}/{sender}/{receiver}"


def _own_address(endpoint: Endpoint) -> str:
    """Return this machine's address as seen from the store's machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((endpoint.host, endpoint.port))  # sends nothing; only looks up the route
        return str(probe.getsockname()[0])


TRANSPORTS.register("tcp", Transport(open_sender, open_receiver))
