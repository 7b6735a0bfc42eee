"""A key-value store shared by the processes of a job, with the methods of
`torch.distributed.Store`.

torch's own TCPStore answers any client: another user of the machine could impersonate a rank, or
read and forge messages between ranks. Here both ends prove that they know the job's secret
(`process.secret`), and every message carries an HMAC of its content and sequence number, using a
per-connection key. Nothing is encrypted.

A frame consists of its length, the HMAC, and length-prefixed fields. A request contains the method
and its arguments, an answer contains a status and the result.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from hybridflow.process.secret import Greeting, Lobby, greet, greet_client, read_exactly

_PURPOSE = "store"
_SIZE = struct.Struct("<Q")
_MAC_BYTES = 32
_MOST_BYTES = 1 << 30
_BACKLOG = 1024
_GREETING_S = 5.0  # after which a silent unauthenticated client is disconnected
_GRACE_S = 5.0  # an answer may arrive this long after the server's own deadline
_RETRY_S = 0.05
_OK = b"ok"
_LATE = b"late"


class StoreError(RuntimeError):
    """Raised if the store is unreachable, or a key is not set by the deadline."""


class StoreLate(StoreError):
    """Raised if keys are not set by the deadline.

    Attributes:
        missing: the keys that were still not set when the server last checked.
    """

    def __init__(self, message: str, missing: list[str]) -> None:
        super().__init__(message)
        self.missing = missing


class _Frames:
    """Numbers, signs and verifies the messages of one connection."""

    def __init__(self, key: bytes, is_client: bool) -> None:
        self._key = key
        self._names = (b"c", b"s") if is_client else (b"s", b"c")
        self._counts = [0, 0]

    def pack(self, fields: Sequence[bytes]) -> bytes:
        """Encode the fields as a frame to send."""
        body = b"".join(_SIZE.pack(len(field)) + field for field in fields)
        return _SIZE.pack(len(body)) + self._mac(0, body) + body

    def unpack(self, mac: bytes, body: bytes) -> list[bytes]:
        """Return the fields of a received frame. Raises ConnectionError if the frame was not sent
        by a process of this job."""
        if not hmac.compare_digest(self._mac(1, body), mac):
            raise ConnectionError("a message was forged, repeated or damaged")
        fields = []
        at = 0
        while at < len(body):
            (size,) = _SIZE.unpack_from(body, at)
            begin = at + _SIZE.size
            at = begin + size
            fields.append(body[begin:at])
        return fields

    def _mac(self, direction: int, body: bytes) -> bytes:
        number = _SIZE.pack(self._counts[direction])
        self._counts[direction] += 1
        return hmac.digest(self._key, self._names[direction] + number + body, "sha256")


def _size(header: bytes) -> int:
    size: int
    (size,) = _SIZE.unpack(header)
    if size > _MOST_BYTES:
        raise ConnectionError(f"a message of {size} bytes exceeds the limit of {_MOST_BYTES}")
    return size


class StoreServer:
    """The key-value server. Its thread serves requests for the lifetime of this object.

    Args:
        host, port: the only address on which it listens; port 0 selects a free port.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        # Connections of a former store on this port may linger for a minute. A second listener is
        # still rejected.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, port))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        served = (self._loop, self._listener, _Keys(self._loop))
        threading.Thread(target=_serve, args=served, name="store", daemon=True).start()

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            # the interpreter is exiting, and the thread has already ended
            with suppress(RuntimeError, AttributeError):
                self._loop.call_soon_threadsafe(self._loop.stop)


def _serve(loop: asyncio.AbstractEventLoop, listener: socket.socket, keys: _Keys) -> None:
    asyncio.set_event_loop(loop)
    server = asyncio.start_server(keys.attend, sock=listener, limit=1 << 20, backlog=_BACKLOG)
    loop.run_until_complete(server)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    listener.close()
    loop.close()


class _Keys:
    """The server's keys and values. Accessed only by the server's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._values: dict[bytes, bytes] = {}
        self._awaited: dict[bytes, set[asyncio.Future[None]]] = {}
        self._lobby = Lobby()

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        try:
            with self._lobby.place(writer.transport.abort):
                greeting = await asyncio.wait_for(_greeted(reader, writer), _GREETING_S)
            frames = _Frames(greeting.key(), is_client=False) if greeting else None
            while frames is not None:
                header = await reader.readexactly(_SIZE.size + _MAC_BYTES)
                body = await reader.readexactly(_size(header[: _SIZE.size]))
                method, *arguments = frames.unpack(header[_SIZE.size :], body)
                answer = await self._answer(method.decode(), arguments)
                writer.write(frames.pack(answer))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # an unauthenticated client, a process that has exited, or the server's shutdown
        finally:
            writer.close()

    async def _answer(self, method: str, arguments: list[bytes]) -> tuple[bytes, ...]:
        if method == "wait":
            seconds, *keys = arguments
            if missing := await self._wait(keys, float(seconds)):
                return (_LATE, *missing)
            return (_OK, *(self._values.get(key, b"") for key in keys))
        result: bytes = getattr(self, f"_do_{method}")(*arguments)
        return (_OK, result)

    async def _wait(self, keys: list[bytes], seconds: float) -> list[bytes]:
        """Wait until all keys are set or the timeout expires. Returns the keys that are still
        missing."""
        deadline = self._loop.time() + seconds
        while missing := [key for key in keys if key not in self._values]:
            found: asyncio.Future[None] = self._loop.create_future()
            self._awaited.setdefault(missing[0], set()).add(found)
            left = deadline - self._loop.time()
            try:
                await asyncio.wait_for(found, max(0.0, left))
            except TimeoutError:
                return [key for key in missing if key not in self._values]
            finally:
                if waiting := self._awaited.get(missing[0]):
                    waiting.discard(found)
        return []

    def _do_set(self, key: bytes, value: bytes) -> bytes:
        self._values[key] = value
        for found in self._awaited.pop(key, ()):
            if not found.done():
                found.set_result(None)
        return b""

    def _do_append(self, key: bytes, value: bytes) -> bytes:
        return self._do_set(key, self._values.get(key, b"") + value)

    def _do_add(self, key: bytes, amount: bytes) -> bytes:
        before = int(self._values.get(key, b"0"))
        total = str(before + int(amount)).encode()
        self._do_set(key, total)
        return total

    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        present = self._values.get(key)
        if (present is None and expected) or (present is not None and present != expected):
            return expected if present is None else present
        self._do_set(key, desired)
        return desired

    def _do_check(self, *keys: bytes) -> bytes:
        return b"1" if all(key in self._values for key in keys) else b""

    def _do_delete_key(self, key: bytes) -> bytes:
        return b"1" if self._values.pop(key, None) is not None else b""

    def _do_num_keys(self) -> bytes:
        return str(len(self._values)).encode()


async def _greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Greeting | None:
    async def write(data: bytes) -> None:
        writer.write(data)

    return await greet_client(reader.readexactly, write, _PURPOSE)


class _Connection:
    """A connection to a `StoreServer`. Waits for the server to start. Requests from several threads
    are serialized.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.host = host
        self.port = port
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket, self._frames = self._connect(time.monotonic() + timeout_s)

    def _connect(self, deadline: float) -> tuple[socket.socket, _Frames]:
        while True:
            connection = None
            try:
                left = max(deadline - time.monotonic(), 0.001)
                connection = socket.create_connection((self.host, self.port), timeout=left)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if greeting := greet(connection, _PURPOSE, left):
                    return connection, _Frames(greeting.key(), is_client=True)
                raise ConnectionRefusedError(
                    "the process listening there does not know the job's secret"
                )
            except OSError as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() + _RETRY_S > deadline:
                    raise StoreError(
                        f"could not reach the job's store at {self.host}:{self.port} within "
                        f"{self.timeout_s:g} s ({error})"
                    ) from error
            time.sleep(_RETRY_S)

    def ask(self, method: str, *arguments: bytes, within_s: float = 0.0) -> list[bytes]:
        """Send a request and return its results. Raises StoreError if the server does not respond,
        StoreLate if keys are not set in time.
        """
        with self._lock:
            try:
                self._socket.settimeout(within_s + max(_GRACE_S, self.timeout_s))
                self._socket.sendall(self._frames.pack((method.encode(), *arguments)))
                header = read_exactly(self._socket, _SIZE.size + _MAC_BYTES)
                body = read_exactly(self._socket, _size(header[: _SIZE.size]))
                status, *results = self._frames.unpack(header[_SIZE.size :], body)
            except OSError as error:
                self.close()
                raise StoreError(
                    f"lost the connection to the store at {self.host}:{self.port}: {error}"
                ) from error
        if status == _LATE:
            missing = [key.decode(errors="replace") for key in results]
            shown = ", ".join(missing[:4])
            raise StoreLate(f"timeout after {within_s:g} s while waiting for {shown}", missing)
        return results

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self.close()


class Keys:
    """A view of the store's keys that begin with `prefix`. Several views can share one
    connection."""

    def __init__(self, connection: _Connection, prefix: str = "") -> None:
        self.connection = connection
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.connection.ask("set", self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """Wait until a key is set and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until several keys are set and return their values."""
        return self._wait(keys, self.connection.timeout_s)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's current value."""
        self.connection.ask("append", self._key(key), _bytes(value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        (total,) = self.connection.ask("add", self._key(key), str(amount).encode())
        return int(total)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the key to `desired` if its current value is `expected`, or if it is not set and
        `expected` is empty. Returns the resulting value, or `expected` if the key is still not set.
        """
        (value,) = self.connection.ask(
            "compare_set", self._key(key), _bytes(expected), _bytes(desired)
        )
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        (are_set,) = self.connection.ask("check", *map(self._key, keys))
        return bool(are_set)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raises StoreError at the deadline."""
        seconds = self.connection.timeout_s if timeout is None else timeout.total_seconds()
        self._wait(keys, seconds)

    def _wait(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        arguments = (str(seconds).encode(), *map(self._key, keys))
        return self.connection.ask("wait", *arguments, within_s=seconds)

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns True if it existed."""
        (existed,) = self.connection.ask("delete_key", self._key(key))
        return bool(existed)

    def num_keys(self) -> int:
        """Return the total number of keys, regardless of prefix."""
        (count,) = self.connection.ask("num_keys")
        return int(count)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _key(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()


class StoreClient(Keys):
    """A separate connection to a `StoreServer`.

    Args:
        timeout_s: deadline for reaching the server, and default timeout of `get` and `wait`.

    Raises:
        StoreError: no process that knows the job's secret has responded at this address by the
            deadline.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        super().__init__(_Connection(host, port, timeout_s))
        self.port = port


class MasterStore(StoreClient):
    """A server and its first client. If `port` is 0, the server listens on a free port,
    `store.port`. Raises OSError if the port is taken.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._server = StoreServer(host, port)
        super().__init__(host, self._server.port, timeout_s)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
