"""Joining and leaving a world of ranks through the job's store."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

from hybridflow.process.store import MasterStore, StoreClient

master_store = MasterStore
client_store = StoreClient
# clean-up for the current world: objects that callers have created there, and its store
_undo: list[Callable[[], None]] = []
_release: list[Callable[[], None]] = []


def join_world(backend: str, timeout_s: float, undo: Callable[[], None] | None = None) -> None:
    """Initialize `torch.distributed` in the world described by RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, unless this process is already in one.

    `timeout_s` bounds every collective: if a rank dies, the others get an error instead of hanging.
    `undo` is called by `leave_world`, so that the caller can drop the process groups that it has
    created.
    """
    import torch.distributed as dist

    from hybridflow.process.signed_objects import sign_objects
    from hybridflow.process.torch_store import TorchStore

    if undo is not None:
        _undo.append(undo)
    if dist.is_initialized():
        return
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    connect = master_store if rank == 0 else client_store
    sign_objects()
    store = TorchStore(
        connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout_s)
    )
    _release.append(store.release)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )


def world_of_one() -> None:
    """Describe a world with a single rank in the environment, for `join_world`. Its store chooses a
    free port, because no other rank needs to find it."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def leave_world() -> None:
    """Destroy the process groups of the current world, so that this process can join another. Does
    nothing if it has not joined one."""
    import torch.distributed as dist

    while _undo:
        _undo.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()
    while _release:
        _release.pop()()
