"""Waiting for shared memory to change: woken by the other side, by its death, by the deadline, and
by nothing that was closed."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.sync import lending
from hybridflow.sync.lending import Notifier, make_pipes, open_pipes
from hybridflow.sync.meeting import PeerWatch

KERNEL = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
    "/proc/self/ns/pid"
)
LONG_S = 60.0


def pair(process: int) -> tuple[Notifier, Notifier]:
    """The sender's end, which watches `process`, and the receiver's, whose descriptors are opened
    as another process would."""
    reads, writes, *theirs = make_pipes()
    receiver = Notifier(
        *open_pipes(os.getpid(), theirs), PeerWatch({"kernel": KERNEL, "process": os.getpid()})
    )
    for fd in theirs:
        os.close(fd)
    return Notifier(reads, writes, PeerWatch({"kernel": KERNEL, "process": process})), receiver


def test_each_side_wakes_the_other_and_a_notification_before_the_wait_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "_LOOK_S", LONG_S)  # after a lost ring nobody looks by himself
    sender, receiver = pair(os.getpid())
    counts = {"sent": 0, "taken": 0}
    rounds = 2000

    def woken(side: Notifier, is_ready: Callable[[], bool]) -> bool:
        ends = time.monotonic() + LONG_S
        while not side.wait(is_ready, ends):
            pass
        return time.monotonic() < ends

    def take() -> None:
        while counts["taken"] < rounds and woken(
            receiver, lambda: counts["sent"] > counts["taken"]
        ):
            counts["taken"] += 1
            receiver.notify()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    for number in range(rounds):
        assert woken(sender, lambda number=number: counts["taken"] == number)  # type: ignore[misc]
        counts["sent"] += 1
        sender.notify()
    thread.join(2 * LONG_S)
    assert counts == {"sent": rounds, "taken": rounds}
    sender.close()
    receiver.close()


@pytest.mark.slow
def test_rings_that_nobody_hears_block_nobody() -> None:
    sender, receiver = pair(os.getpid())
    for _ in range(200_000):  # more than a pipe holds
        sender.notify()
    assert receiver.wait(lambda: True, time.monotonic() + LONG_S)
    receiver.close()
    sender.notify()  # nobody is there
    sender.close()


def test_the_death_of_the_other_side_ends_the_wait() -> None:
    other = subprocess.Popen(["sleep", "600"])
    sender, receiver = pair(other.pid)
    threading.Timer(0.02, other.kill).start()
    ends = time.monotonic() + LONG_S
    while other.poll() is None and time.monotonic() < ends:
        assert not sender.wait(lambda: False, ends)
    assert other.returncode == -9
    sender.close()
    receiver.close()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_closed_notification_neither_hangs_nor_touches_other_files(when: str) -> None:
    sender, receiver = pair(os.getpid())
    receiver.close()
    if when == "before":
        sender.close()
    else:
        threading.Timer(0.02, sender.close).start()
    assert not sender.wait(lambda: False, time.monotonic() + 0.3)
    sender.close()
    sender.notify()
