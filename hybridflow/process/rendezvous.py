"""A torch TCPStore that listens on one interface, and joining a world through it.

TCPStore by itself listens on all interfaces, whatever host it is given; therefore the master's socket is bound here.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def master_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store's server and first client. With `port` 0 it listens on a free port, `store.port`. OSError when the port
    is taken."""
    from torch.distributed import TCPStore

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Connections of a former store on this port may linger for a minute. Another listener is still refused.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(1024)
    return TCPStore(
        host_name=host,
        port=listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def client_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a `master_store`, waiting for it to come up."""
    from torch.distributed import TCPStore

    return TCPStore(
        host_name=host, port=port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def join_world(backend: str, timeout_s: float) -> None:
    """Start `torch.distributed` in the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, unless this
    process has joined one.

    `timeout_s` bounds every collective: when a rank dies, the others get an error and do not hang.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    connect = master_store if rank == 0 else client_store
    store = connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
