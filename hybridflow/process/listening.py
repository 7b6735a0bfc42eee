"""Which user listens at an address of this machine, asked of the kernel before a key or token is
sent there.

A port that is about to be used can be taken by anybody, and who takes it would be sent what opens
the real server.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def listeners_at(host: str, port: int) -> set[int]:
    """The user numbers of who listens at HOST (an IP address) and PORT, there or at every address
    of the machine, in this network namespace. Empty where nobody listens yet."""
    address = ipaddress.ip_address(host)
    forms = {address.packed, bytes(len(address.packed)), bytes(16)}
    if address.version == 4:
        forms.add(bytes(10) + b"\xff\xff" + address.packed)
    wanted = {f"{_kernels(packed)}:{port:04X}" for packed in forms}
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[1] in wanted:
                    found.add(int(fields[7]))
    return found


def _kernels(packed: bytes) -> str:
    """An address as /proc/net shows it: words of four bytes, each with its last byte first."""
    return b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4)).hex().upper()
