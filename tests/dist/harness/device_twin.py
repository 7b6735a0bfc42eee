"""The transport between processes of one GPU, without a GPU: files stand for device memory that
another process opens, and for events, which are done a moment after they were recorded. With it go
sessions over two "nodes"."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridflow.sync import meeting
from hybridflow.sync.lending import Receiver, Sender
from hybridflow.sync.meeting import Member
from hybridflow.sync.transports import p2p
from hybridflow.sync.transports.base import TRANSPORTS, Endpoint, Transport
from hybridflow.sync.transports.cuda_ipc import DeviceMemory, join_nodes

LATENCY_S = 1e-3
_numbers = itertools.count()


def mapped(path: str, nbytes: int = 0) -> torch.Tensor:
    """A file as uint8 `[nbytes]`, made with so many bytes if they are given."""
    with open(path, "r+b" if not nbytes else "w+b") as file:
        file.truncate(nbytes) if nbytes else None
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class Events:
    def __init__(self, count: int, path: str) -> None:
        self._done_at = mapped(path, 8 * count).view(torch.float64)
        self.handles = [f"{path}#{number}" for number in range(count)]

    def record(self, number: int) -> None:
        self._done_at[number] = time.monotonic() + LATENCY_S

    def release(self) -> None:
        Path(self.handles[0].partition("#")[0]).unlink(missing_ok=True)


class PeerEvents:
    def __init__(self, handles: Sequence[str]) -> None:
        self._done_at = mapped(handles[0].partition("#")[0]).view(torch.float64)

    def is_done(self, number: int) -> bool:
        return time.monotonic() >= float(self._done_at[number])


class PeerMemory:
    """What stands for `device.peer_memory`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def _path(self) -> str:
        return str(self._folder / f"{os.getpid()}-{next(_numbers)}")

    def export(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, str]:
        path = self._path()
        return mapped(path, nbytes), path

    def import_memory(self, text: str, device: torch.device) -> torch.Tensor:
        memory = mapped(text)
        os.unlink(text)  # it is opened once
        return memory

    def Events(self, count: int, device: torch.device) -> Events:
        return Events(count, self._path())

    def PeerEvents(self, handles: Sequence[str], device: torch.device) -> PeerEvents:
        return PeerEvents(handles)


def _memory(device: torch.device) -> DeviceMemory:
    return DeviceMemory(device, PeerMemory(Path(os.environ["DEVICE_TWIN_FOLDER"]) / "device"))


def open_sender(endpoint: Endpoint, rank: int, device: torch.device) -> Sender:
    return Sender(Member(endpoint, "trainer", rank), _memory(device))


def open_receiver(endpoint: Endpoint, rank: int, device: torch.device) -> Receiver:
    return Receiver(Member(endpoint, "engine", rank), _memory(device))


TRANSPORTS.register("device_twin", Transport(open_sender, open_receiver))


def _on_node(member: Member) -> None:
    """Let a rank say that it is on one of two nodes: even ranks on one, odd ones on the other."""
    kernel = f"node {member.rank % 2}"
    meeting._kernel = lambda: kernel


def open_sender_of_two_nodes(endpoint: Endpoint, rank: int, device: torch.device) -> Any:
    _on_node(member := Member(endpoint, "trainer", rank))
    return join_nodes(
        member,
        lambda near: Sender(near, _memory(device)),
        lambda: p2p.open_sender(endpoint, rank, device),
    )


def open_receiver_of_two_nodes(endpoint: Endpoint, rank: int, device: torch.device) -> Any:
    _on_node(member := Member(endpoint, "engine", rank))
    return join_nodes(
        member,
        lambda near: Receiver(near, _memory(device)),
        lambda: p2p.open_receiver(endpoint, rank, device),
    )


TRANSPORTS.register("two_nodes", Transport(open_sender_of_two_nodes, open_receiver_of_two_nodes))
