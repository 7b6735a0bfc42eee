"""The store of a job's processes, and joining a world of ranks through it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

from hybridflow.process.store import MasterStore, StoreClient

master_store = MasterStore
client_store = StoreClient
# of the world that this process has joined: what its callers have made there, and how to let go of
# its store
_undo: list[Callable[[], None]] = []
_release: list[Callable[[], None]] = []


def join_world(backend: str, timeout_s: float, undo: Callable[[], None] | None = None) -> None:
    """Start `torch.distributed` in the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    describe, unless this process has joined one.

    `timeout_s` bounds every collective: when a rank dies, the others get an error and do not hang.
    `undo` is called by `leave_world` and forgets process groups that the caller makes.
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


def leave_world() -> None:
    """End the process groups of the world that this process has joined, so that it can join
    another; nothing without one."""
    import torch.distributed as dist

    while _undo:
        _undo.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()
    while _release:
        _release.pop()()
