"""Lookup of the user that listens on a local address. Used before a key or token is sent there. Any
user can occupy a port that is about to be used, and would then receive the real server's
credentials.
"""

from __future__ import annotations

import ipaddress
import struct
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def listeners_at(host: str, port: int) -> set[int]:
    """Return the ids of the users that listen on `port` in this network namespace, at `host` (an IP
    address) or on all addresses. The set is empty if there are none."""
    address = ipaddress.ip_address(host)
    forms = {address.packed, bytes(len(address.packed)), bytes(16)}
    if address.version == 4:
        forms.add(bytes(10) + b"\xff\xff" + address.packed)
    wanted = {f"{_proc_form(packed)}:{port:04X}" for packed in forms}
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # kernel without IPv6
            lines = Path("/proc/net", table).read_text().splitlines()
            for line in lines[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[1] in wanted:
                    found.add(int(fields[7]))
    return found


def _proc_form(packed: bytes) -> str:
    """Format an address as /proc/net does: words of four bytes, each in reverse byte order."""
    count = len(packed) // 4
    words = struct.unpack(f">{count}I", packed)
    return struct.pack(f"<{count}I", *words).hex().upper()
