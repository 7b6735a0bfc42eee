"""Ways to bring the messages of a slice plan from trainer ranks to the ranks of one engine.

| Name | For | Needs |
|---|---|---|
| `p2p` | any placement: gloo between CPU buffers, NCCL between GPU buffers | nothing |
| `tcp` | any placement, CPU buffers: faster than gloo where cores are few | nothing |
| `shared_memory` | engine and trainer ranks on one host, CPU buffers | one kernel and user for both |
| `disk` | where nothing else goes | a folder that both sides see |
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hybridflow.device.platform import Platform
from hybridflow.errors import WeightSyncError
from hybridflow.sync.transports.base import Endpoint, ReceiveChannel, SendChannel

TRANSPORTS = ("p2p", "tcp", "shared_memory", "disk")
_GLOO_PARTS = 4


def chosen(wanted: str, platform: Platform) -> str:
    """The transport that is meant by `wanted`: `auto` is what carries weights between any two hosts fastest."""
    return platform.weight_transport if wanted == "auto" else wanted


def part_bytes(transport: str, platform: Platform) -> int:
    """Bytes of a message (`Messages`): those that stay in a core's cache from being packed to being sent; 0: whole
    buckets.

    Over gloo more: it hands each message to a thread of its own and asks the receiver before it, which costs more than
    the cache saves.
    """
    return platform.cache_bytes * (_GLOO_PARTS if transport == "p2p" else 1)


def open_sender(endpoint: Endpoint, rank: int, device: torch.device | str = "cpu") -> SendChannel:
    """Trainer rank `rank`'s end of the session. Blocks until all ranks of the session are there.

    Args:
        device: of the payloads that will be sent.

    Raises:
        WeightSyncError: no such transport or rank, or some rank did not come within the endpoint's `timeout_s` (it is
        named).
    """
    module = _transport(endpoint, rank, endpoint.senders, "trainer")
    channel: SendChannel = module.open_sender(endpoint, rank, torch.device(device))
    return channel


def open_receiver(endpoint: Endpoint, rank: int, device: torch.device | str = "cpu") -> ReceiveChannel:
    """Engine rank `rank`'s end of the session; see `open_sender`."""
    module = _transport(endpoint, rank, endpoint.receivers, "engine")
    channel: ReceiveChannel = module.open_receiver(endpoint, rank, torch.device(device))
    return channel


def _transport(endpoint: Endpoint, rank: int, ranks: tuple[int, ...], side: str) -> Any:
    if endpoint.transport not in TRANSPORTS:
        raise WeightSyncError(f"no transport is called {endpoint.transport!r}; choose one of {', '.join(TRANSPORTS)}")
    if rank not in ranks:
        raise WeightSyncError(
            f"{side} rank {rank} takes no part in session {endpoint.session}, its {side} ranks are {list(ranks)}"
        )
    return importlib.import_module(f"hybridflow.sync.transports.{endpoint.transport}")
