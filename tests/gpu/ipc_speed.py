"""A second process opens this one's memory and copies it: `device.peer_memory` without a
transport."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch

from hybridflow.device import peer_memory
from tests.gpu.measure import result, seconds

HANDED = "HYBRIDFLOW_GPU_HANDED"
NBYTES = 1 << 28
WAIT_S = 20.0
DEVICE = torch.device("cuda", 0)


def give() -> int:
    """Export memory, and run the process that reads it; its exit status."""
    tensor, memory = peer_memory.export(NBYTES, DEVICE)
    events = peer_memory.Events(1, DEVICE)
    tensor.view(torch.int64).copy_(torch.arange(NBYTES // 8, device=DEVICE))
    events.record(0)
    env = {**os.environ, HANDED: json.dumps([memory, events.handles])}
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.ipc_speed"], env=env, timeout=35, check=False
    ).returncode


def take(handed: str) -> None:
    """Copy the other process's memory, and compare."""
    memory, handles = json.loads(handed)
    theirs = peer_memory.import_memory(memory, DEVICE)
    events = peer_memory.PeerEvents(handles, DEVICE)
    deadline = time.monotonic() + WAIT_S
    while not events.is_done(0):
        assert time.monotonic() < deadline, "the other process's event does not come"
        time.sleep(1e-4)
    mine = torch.empty_like(theirs)
    taken = seconds(lambda: mine.copy_(theirs), 20)
    equal = torch.equal(mine.view(torch.int64), torch.arange(NBYTES // 8, device=DEVICE))
    result({"equal": int(equal), "TB_s": 2 * NBYTES / taken / 1e12})


if __name__ == "__main__":
    if HANDED in os.environ:
        take(os.environ[HANDED])
    else:
        sys.exit(give())
