"""Two network namespaces whose only link loses, delays and repeats frames: `lossy_link.py LOST
REPEATED DELAY_MS`.

It needs root and /dev/net/tun, but no `netem` in the kernel. It prints the process ids by which
`nsenter --net` finds the namespaces, whose addresses are 10.77.0.1 and 10.77.0.2, as a JSON list,
carries frames until its stdin is closed, and then prints how many it carried, lost and repeated.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
MTU = 9000
QUEUE = 1000  # frames on their way; more are lost, as in a switch


def open_end(number: int) -> tuple[int, subprocess.Popen[bytes]]:
    """A namespace with one interface: the descriptor of its frames, and a process that keeps the
    namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace may be made")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", b"link0", IFF_TAP | IFF_NO_PI))
    for words in (
        ["addr", "add", f"10.77.0.{number}/24", "dev", "link0"],
        ["link", "set", "link0", "mtu", str(MTU), "up"],
        ["link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    return tap, subprocess.Popen(["sleep", "infinity"])


def carry(taps: list[int], lost: float, repeated: float, delay_s: float) -> dict[str, int]:
    """Carry frames between the two ends until stdin is closed. `lost` and `repeated` are shares of
    the frames."""
    chance = random.Random(0)
    told = {"carried": 0, "lost": 0, "repeated": 0}
    on_the_way: list[tuple[float, int, int, bytes]] = []  # due, number, where to, frame
    poll = select.poll()
    number = 0
    for descriptor in (0, *taps):
        poll.register(descriptor, select.POLLIN)
    while True:
        wait = max(on_the_way[0][0] - time.monotonic(), 0) * 1000 if on_the_way else None
        for descriptor, _ in poll.poll(wait):
            if descriptor == 0:
                return told
            frame = os.read(descriptor, MTU + 64)
            other = taps[1 - taps.index(descriptor)]
            if chance.random() < lost or len(on_the_way) >= QUEUE:
                told["lost"] += 1
                continue
            twice = chance.random() < repeated
            told["repeated"] += twice
            for _ in range(1 + twice):
                number += 1
                due = time.monotonic() + delay_s * chance.uniform(0.5, 1.5)
                heapq.heappush(on_the_way, (due, number, other, frame))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(on_the_way)
            try:
                os.write(to, frame)
                told["carried"] += 1
            except OSError:
                told["lost"] += 1


def main() -> None:
    """Make the link and keep it."""
    lost, repeated, delay_ms = map(float, sys.argv[1:])
    ends = [open_end(number) for number in (1, 2)]
    try:
        print(json.dumps([keeper.pid for _, keeper in ends]), flush=True)
        print(
            json.dumps(carry([tap for tap, _ in ends], lost, repeated, delay_ms / 1000)), flush=True
        )
    finally:
        for _, keeper in ends:
            keeper.kill()
            keeper.wait()


if __name__ == "__main__":
    main()
