"""Messages as lines of JSON over a socket. Bytes and times, which parquet columns may hold, keep their type."""

from __future__ import annotations

import base64
import datetime
import json
import socket
from typing import Any

_KIND = "__hybridflow__"


class Lines:
    """One end of a connection; it blocks unless its socket is told not to."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._in, self._out = bytearray(), bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message at once (the socket blocks)."""
        self.socket.sendall(encoded(message))

    def queue(self, message: dict[str, Any]) -> None:
        """Send a message with the next `flush`."""
        self._out += encoded(message)

    def flush(self) -> bool:
        """Send what the socket takes now; whether something is left."""
        while self._out:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                break
            except OSError:  # the other end has gone, which reading says as well
                self._out.clear()
                break
            del self._out[:sent]
        return bool(self._out)

    def received(self) -> list[dict[str, Any]] | None:
        """The messages that are complete after one read; None when the other end has closed the connection."""
        try:
            part = self.socket.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionError:
            return None
        if not part:
            return None
        self._in += part
        whole, newline, rest = self._in.rpartition(b"\n")
        if not newline:
            return []
        self._in = bytearray(rest)
        return [decoded(line) for line in whole.split(b"\n")]


def encoded(message: dict[str, Any]) -> bytes:
    """A message as a line. ValueError names the type of a value that is not plain data."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def decoded(line: bytes | bytearray) -> dict[str, Any]:
    """The message of a line."""
    message: dict[str, Any] = json.loads(line, object_hook=_restored)
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_KIND: "bytes", "text": base64.b64encode(value).decode()}
    if isinstance(value, datetime.date):  # a datetime is one as well
        return {_KIND: type(value).__name__, "text": value.isoformat()}
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    raise ValueError(f"a value of type {type(value).__name__}")


def _restored(value: dict[str, Any]) -> Any:
    kind = value.get(_KIND)
    if kind == "bytes":
        return base64.b64decode(value["text"])
    if kind in ("date", "datetime"):
        return getattr(datetime, kind).fromisoformat(value["text"])
    return value
