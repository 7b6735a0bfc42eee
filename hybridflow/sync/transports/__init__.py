"""Ways to bring the messages of a slice plan from trainer ranks to the ranks of one engine: one file each, which
declares where it runs."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridflow.config.registry import is_user_entry
from hybridflow.device.platform import Platform
from hybridflow.errors import ConfigError, WeightSyncError
from hybridflow.sync.transports.base import TRANSPORTS, Endpoint, ReceiveChannel, SendChannel, Transport


def chosen(wanted: str, platform: Platform, shares_devices: bool = False) -> str:
    """The transport that `wanted` names, a user's file by its absolute path; `auto` is what carries weights between any
    two hosts fastest, and between two processes of one GPU where trainer and engines share them (`shares_devices`)."""
    if is_user_entry(wanted):
        path, _, name = wanted.rpartition(":")
        return f"{Path(path).absolute()}:{name}"
    if wanted != "auto":
        return wanted
    return platform.colocated_transport if shares_devices else platform.weight_transport


def part_bytes(transport: str, platform: Platform) -> int:
    """Bytes of a message (`Messages`): those that stay in a core's cache from being packed to being sent; 0: whole
    buckets."""
    return platform.cache_bytes * TRANSPORTS.get(transport).parts


def open_sender(endpoint: Endpoint, rank: int, device: torch.device | str = "cpu") -> SendChannel:
    """Trainer rank `rank`'s end of the session. Blocks until all ranks of the session are there.

    Args:
        device: of the payloads that will be sent.

    Raises:
        WeightSyncError: no such transport or rank, or some rank did not come within the endpoint's `timeout_s` (it is
        named).
    """
    transport = _transport(endpoint, rank, endpoint.senders, "trainer")
    return transport.open_sender(endpoint, rank, torch.device(device))


def open_receiver(endpoint: Endpoint, rank: int, device: torch.device | str = "cpu") -> ReceiveChannel:
    """Engine rank `rank`'s end of the session, as `open_sender` opens a trainer rank's."""
    transport = _transport(endpoint, rank, endpoint.receivers, "engine")
    return transport.open_receiver(endpoint, rank, torch.device(device))


def _transport(endpoint: Endpoint, rank: int, ranks: tuple[int, ...], side: str) -> Transport:
    if rank not in ranks:
        raise WeightSyncError(
            f"{side} rank {rank} takes no part in session {endpoint.session}, its {side} ranks are {list(ranks)}"
        )
    try:
        return TRANSPORTS.get(endpoint.transport)
    except ConfigError as error:
        raise WeightSyncError(str(error)) from error
