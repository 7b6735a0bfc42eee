"""What the checks for a GPU ask of an engine's weights; `tests/dist/test_weight_sync.py` asks the
same on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.single_controller import block_on
from tests.dist.harness.sync_world import SyncWorld
from tests.engine_weights import load_weights_from_disk, weights_checksum


def through_empty_updates(world: SyncWorld, number: int) -> list[Any]:
    """An engine's checksums: before an update, after one that brings nothing, and after its layout
    was traced anew.

    SGLang runs its step after loading at the end of every update. Where that step permutes or
    repacks weights, an update without weights would change them.
    """
    client = world.client(number)
    found = [weights_checksum(client)]
    client.begin_weight_update()
    client.end_weight_update()
    found.append(weights_checksum(client))
    world.configure()
    return [*found, weights_checksum(client)]


def after_sleep(world: SyncWorld, seed: int) -> int:
    """New weights for engines that sleep, as in a colocated run: weights wake, are filled, then the
    cache wakes. Returns the MiB of the device that are in use while they sleep, by whatever
    process."""
    version = world.train(seed)
    block_on(world.engines.sleep())
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    block_on(world.engines.wake(["weights"]))
    report = world.sync(version)
    assert report.stale == {}, report.stale
    block_on(world.engines.wake(["kv_cache"]))
    return (total - free) >> 20


def cold_start(world: SyncWorld, number: int, seed: int) -> Any:
    """An engine's checksum after it has loaded a folder with the weights of a seed."""
    client = world.client(number)
    load_weights_from_disk(client, str(world.exported(seed)))
    return weights_checksum(client)
