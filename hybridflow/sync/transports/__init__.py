"""Transports, one per file, that carry a slice plan's messages from trainer ranks to the ranks of
one engine. Each transport declares where it runs."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridflow.config.registry import is_user_entry
from hybridflow.device.platform import Platform
from hybridflow.errors import ConfigError, WeightSyncError
from hybridflow.sync.transports.base import (
    TRANSPORTS,
    Endpoint,
    ReceiveChannel,
    SendChannel,
    Transport,
)


def chosen(wanted: str, platform: Platform, shares_devices: bool = False) -> str:
    """Resolve a transport name. A user file is returned with its absolute path.

    `auto` selects the fastest transport that works between any two hosts. If trainer and engines
    share GPUs (`shares_devices`), it selects the fastest one that works between two processes on
    one GPU.
    """
    if is_user_entry(wanted):
        path, _, name = wanted.rpartition(":")
        return f"{Path(path).absolute()}:{name}"
    if wanted != "auto":
        return wanted
    return platform.colocated_transport if shares_devices else platform.weight_transport


def part_bytes(transport: str, platform: Platform) -> int:
    """Return the part size for `Messages` in bytes, chosen so that a part stays cached from packing
    to sending. 0 means whole buckets."""
    return platform.cache_bytes * TRANSPORTS.get(transport).parts


def open_sender(endpoint: Endpoint, rank: int, device: torch.device | str = "cpu") -> SendChannel:
    """Open trainer rank `rank`'s end of the session. Blocks until all ranks of the session have
    arrived.

    Args:
        device: device of the payloads to send.

    Raises:
        WeightSyncError: no such transport or rank, or a rank did not arrive within the endpoint's
            `timeout_s` (the message names it).
    """
    transport = _transport(endpoint, rank, endpoint.senders, "trainer")
    return transport.open_sender(endpoint, rank, torch.device(device))


def open_receiver(
    endpoint: Endpoint, rank: int, device: torch.device | str = "cpu"
) -> ReceiveChannel:
    """Open engine rank `rank`'s end of the session. The counterpart of `open_sender`."""
    transport = _transport(endpoint, rank, endpoint.receivers, "engine")
    return transport.open_receiver(endpoint, rank, torch.device(device))


def _transport(endpoint: Endpoint, rank: int, ranks: tuple[int, ...], side: str) -> Transport:
    if rank not in ranks:
        raise WeightSyncError(
            f"{side} rank {rank} is not in session {endpoint.session}, whose {side} ranks are "
            f"{list(ranks)}"
        )
    try:
        return TRANSPORTS.get(endpoint.transport)
    except ConfigError as error:
        raise WeightSyncError(str(error)) from error
