"""Lent memory whose writers and readers are devices: what one side has started on a slot is done
before the other side sees it, and a device or process that never gets there is an error at the
deadline."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybridflow.errors import WeightSyncError
from hybridflow.process.rendezvous import master_store
from hybridflow.sync import meeting
from hybridflow.sync.lending import Receiver, Sender
from hybridflow.sync.meeting import Member
from hybridflow.sync.transports import cuda_ipc
from hybridflow.sync.transports.base import Endpoint, Payload
from hybridflow.sync.transports.cuda_ipc import DeviceMemory

CPU = torch.device("cpu")


class Device:
    """Both processes' view of one GPU: what was recorded is done when the test says so."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self.recorded: dict[str, int] = defaultdict(int)
        self.done: dict[str, int] = defaultdict(int)
        self.is_fast = True
        self.asked = threading.Event()  # somebody looks whether a record is done
        self.released = 0

    def export(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, str]:
        name = f"slab-{len(self.memory)}"
        self.memory[name] = torch.zeros(nbytes, dtype=torch.uint8)
        return self.memory[name], name

    def import_memory(self, text: str, device: torch.device) -> torch.Tensor:
        return self.memory[text]

    def Events(self, count: int, device: torch.device) -> Any:
        return _Events(self, count)

    def PeerEvents(self, handles: Sequence[str], device: torch.device) -> Any:
        return _PeerEvents(self, handles)

    def finish(self) -> None:
        self.done |= self.recorded


class _Events:
    numbers = iter(range(1000))

    def __init__(self, device: Device, count: int) -> None:
        self.device = device
        first = next(self.numbers)
        self.handles = [f"event-{first}-{number}" for number in range(count)]

    def record(self, number: int) -> None:
        self.device.recorded[self.handles[number]] += 1
        if self.device.is_fast:
            self.device.finish()

    def release(self) -> None:
        self.device.released += 1


class _PeerEvents:
    def __init__(self, device: Device, handles: Sequence[str]) -> None:
        self.device = device
        self.handles = handles

    def is_done(self, number: int) -> bool:
        self.device.asked.set()
        handle = self.handles[number]
        return self.device.done[handle] == self.device.recorded[handle]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture(scope="module")
def store() -> Any:
    held = master_store("127.0.0.1", 0, 60)
    yield held.port
    del held


def pair(store: int, device: Device, name: str) -> tuple[Sender, Receiver]:
    """Both ends, opened in two threads of this process."""
    endpoint = Endpoint("cuda_ipc", name, "127.0.0.1", store, (0,), (0,), 1 << 20, 60.0)
    opened: list[Sender] = []
    thread = threading.Thread(
        target=lambda: opened.append(
            Sender(Member(endpoint, "trainer", 0), DeviceMemory(CPU, device))
        )
    )
    thread.start()
    receiver = Receiver(Member(endpoint, "engine", 0), DeviceMemory(CPU, device))
    thread.join()
    return opened[0], receiver


def send(sender: Sender, tag: int, value: int, nbytes: int = 100) -> Payload:
    payload = sender.lend(0, tag, nbytes)
    payload.tensor.fill_(value)
    sender.send(0, tag, payload).wait()
    return payload


def test_messages_of_growing_size_come_in_order_through_few_slots(
    store: int, device: Device
) -> None:
    sender, receiver = pair(store, device, "order")
    sizes = [10, 1 << 16, 1 << 17, 100, 1 << 20, 1 << 20]
    for _ in range(3):
        sender.rewind()
        receiver.rewind()
        for tag, size in enumerate(sizes):
            send(sender, tag, tag + 1, size)
            loan = receiver.borrow(0, tag, size)
            assert (
                loan.payload.tensor.tolist() == [tag + 1] * size
                if size < 1000
                else bool((loan.payload.tensor == tag + 1).all())
            )
            loan.release()
        made = len(device.memory)
    # a slot grows by doubling, and not again in later syncs
    assert made == len(device.memory) <= 2 * 5
    sender.close()
    receiver.close()
    assert device.released == 2


def test_a_message_is_seen_when_the_senders_device_has_written_it(
    store: int, device: Device
) -> None:
    sender, receiver = pair(store, device, "written")
    device.is_fast = False
    send(sender, 7, 1)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(receiver.borrow(0, 7, 100)))
    thread.start()
    thread.join(0.2)
    assert got == []  # it was published, and the device has not got there
    device.finish()
    thread.join(120)
    assert len(got) == 1
    sender.close()
    receiver.close()


def test_a_slot_is_lent_again_when_the_receivers_device_has_read_it(
    store: int, device: Device
) -> None:
    sender, receiver = pair(store, device, "read")
    for tag in (0, 1):
        send(sender, tag, tag)
    device.is_fast = False
    receiver.borrow(0, 0, 100).release()
    got: list[Payload] = []
    thread = threading.Thread(target=lambda: got.append(sender.lend(0, 2, 100)))
    thread.start()
    thread.join(0.2)
    assert got == []
    device.finish()
    thread.join(120)
    assert len(got) == 1
    sender.close()
    receiver.close()


def test_a_device_that_never_gets_there_is_an_error_at_the_deadline(
    store: int, device: Device
) -> None:
    sender, receiver = pair(store, device, "late")
    receiver.member.endpoint.__dict__["timeout_s"] = 0.3
    device.is_fast = False
    send(sender, 7, 1)
    with pytest.raises(
        WeightSyncError,
        match=r"message 7 with trainer rank 0 over cuda_ipc: the peer made no progress for",
    ):
        receiver.borrow(0, 7, 100)
    sender.close()
    receiver.close()


def test_another_thread_gives_up_what_a_device_has_not_done(store: int, device: Device) -> None:
    sender, receiver = pair(store, device, "given up")
    device.is_fast = False
    send(sender, 7, 1)

    def give_up() -> None:
        device.asked.wait(60)
        receiver.abort()

    thread = threading.Thread(target=give_up)
    thread.start()
    with pytest.raises(WeightSyncError, match="the session was aborted meanwhile"):
        receiver.borrow(0, 7, 100)
    thread.join()
    sender.close()


def test_a_peer_that_died_before_its_device_got_there_is_named(
    store: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(
        "hybridflow.sync.lending.PeerWatch",
        lambda said: meeting.PeerWatch({**said, "process": process.pid}),
    )
    sender, receiver = pair(store, device, "dead")
    device.is_fast = False
    send(sender, 7, 1)
    process.kill()
    process.wait()
    with pytest.raises(WeightSyncError, match="the peer is gone: its process has ended"):
        receiver.borrow(0, 7, 100)
    sender.close()
    receiver.close()


def test_buffers_of_a_cpu_are_refused() -> None:
    endpoint = Endpoint("cuda_ipc", "s", "127.0.0.1", 1, (0,), (0,), 8, 1.0)
    for opened in (cuda_ipc.open_sender, cuda_ipc.open_receiver):
        with pytest.raises(WeightSyncError, match=r"requires GPU buffers, .* rank 0 are on cpu"):
            opened(endpoint, 0, CPU)
