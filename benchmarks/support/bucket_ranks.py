"""Two ranks on one host that perform syncs over shared memory, verl's bucketed transfer, and a
plain copy."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from benchmarks.support import peer
from benchmarks.support.reshard_ranks import Ranks


class NoDevice:
    """A substitute for torch.cuda, which verl uses if there is no accelerator."""

    def synchronize(self) -> None:
        """Do nothing, because no work is queued."""

    def empty_cache(self) -> None:
        """Do nothing, because no memory is cached."""


def load_peer() -> ModuleType:
    """Load verl's module by path, because its package imports vllm but the module does not."""
    path = (
        peer.install() / "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    )
    spec = importlib.util.spec_from_file_location("peer_bucketed_weight_transfer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.get_torch_device = NoDevice
    module.is_support_ipc = lambda: False
    return module


class BucketRanks(Ranks):
    """A trainer rank (0) and an engine rank (1)."""

    def __init__(self, rank: int, folder: str, **arguments: Any) -> None:
        super().__init__(rank, **arguments)
        self.peer = load_peer()
        self.handle = f"ipc://{folder}/weights.sock"
        elements = sum(values.numel() for values in self.live.values())
        # loaded by the peer; also the target of plain copies, because a third set of
        # weights would not fit
        self.flat = torch.zeros(elements, dtype=torch.bfloat16)
        self.places: dict[str, slice] = {}

    def peer_sync(self, bucket_mb: int) -> None:
        """Send all parameters with verl. Each parameter is copied out of the bucket, as when
        loading weights."""
        if self.is_trainer:
            sender = self.peer.BucketedWeightSender(
                self.handle, bucket_mb, use_shm=True
            )
            asyncio.run(sender.async_send_weights(iter(self.live.items())))
        else:
            cpu = torch.device("cpu")
            receiver = self.peer.BucketedWeightReceiver(self.handle, cpu, use_shm=True)
            receiver.receive_weights(self._load)

    def _load(self, weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for name, values in weights:
            if name not in self.places:
                begin = max((place.stop for place in self.places.values()), default=0)
                self.places[name] = slice(begin, begin + values.numel())
            self.flat[self.places[name]].copy_(values.view(-1))

    def copy(self) -> None:
        """Copy the engine's bytes with one thread in the engine's process. This is the limit."""
        begin = 0
        for values in self.live.values() if not self.is_trainer else ():
            self.flat[begin : begin + values.numel()].copy_(values.view(-1))
            begin += values.numel()
