"""Point-to-point over NCCL without GPUs: a stand-in for torch's group with what its documentation says of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.errors import WeightSyncError
from hybridflow.sync.meeting import Meeting
from hybridflow.sync.transports import p2p
from hybridflow.sync.transports.base import Endpoint

ENDPOINT = Endpoint("p2p", "s", "10.0.0.1", 5, senders=(0,), receivers=(0,), message_bytes=8, timeout_s=60.0)


class Work:
    """A transfer that ends when the test says so. A group that was aborted counts as completed, without an error."""

    def __init__(self, group: NcclGroup) -> None:
        self.group, self.is_done = group, False

    def is_completed(self) -> bool:
        return self.is_done or self.group.is_aborted

    def wait(self, timeout: timedelta | None = None) -> None:
        assert timeout is None, "a deadline of NCCL's aborts the communicator"


class NcclGroup:
    """ProcessGroupNCCL: its watchdog ends the process when a transfer outlives the group's timeout, or on an error
    unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 as the group is made."""

    made: NcclGroup

    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.ends_process_after, self.is_aborted = options._timeout, False
        self.errors_end_process = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        self.work = Work(self)
        NcclGroup.made = self

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self.work

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch, peer: subprocess.Popen[bytes]) -> Any:
    from hybridflow.sync import meeting

    client = SimpleNamespace(close=lambda: None)
    said = {0: {"process": peer.pid, "kernel": meeting._kernel()}}
    monkeypatch.setattr(p2p, "meet", lambda member: Meeting(SimpleNamespace(client=client), said))  # type: ignore[arg-type]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return p2p.open_sender(replace(ENDPOINT), 0, torch.device("cuda"))


def started(channel: Any) -> Any:
    payload: Any = SimpleNamespace(tensor=torch.zeros(2))
    return channel.send(0, 3, payload)


def test_neither_time_nor_an_error_ends_the_process(channel: Any) -> None:
    assert NcclGroup.made.ends_process_after > timedelta(days=1)
    assert not NcclGroup.made.errors_end_process
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"  # of the process's other groups


def test_a_transfer_that_has_ended_is_done_and_a_late_one_fails_at_our_deadline(channel: Any) -> None:
    work = started(channel)
    channel.member.endpoint.__dict__["timeout_s"] = 0.5
    with pytest.raises(WeightSyncError, match=r"did nothing for 0\.5 s"):
        work.wait()
    NcclGroup.made.work.is_done = True
    work.wait()


def test_a_dead_peer_is_noticed_by_its_process(channel: Any, peer: subprocess.Popen[bytes]) -> None:
    work = started(channel)
    peer.kill()
    with pytest.raises(WeightSyncError, match="its process has ended"):
        work.wait()


def test_an_abort_by_another_thread_is_no_success(channel: Any) -> None:
    work = started(channel)
    threading.Timer(0.1, channel.abort).start()
    with pytest.raises(WeightSyncError, match="the session was given up before"):
        work.wait()
