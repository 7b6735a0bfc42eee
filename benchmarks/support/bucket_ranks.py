"""Two ranks on one host that perform syncs over shared memory, verl's bucketed transfer, and a
plain copy."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from benchmarks.support import peer
from benchmarks.support.reshard_ranks import Ranks

from hybridflow.dispatch import Dispatch, WorkerContext, register

# a substitute for torch.cuda, which verl uses if there is no accelerator
NO_DEVICE = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)


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
    module.get_torch_device = lambda: NO_DEVICE
    module.is_support_ipc = lambda: False
    return module


class BucketRanks(Ranks):
    """A trainer rank (0) and an engine rank (1)."""

    def __init__(self, context: WorkerContext, folder: str, *args: Any) -> None:
        super().__init__(context, *args)
        self.peer = load_peer()
        self.handle = f"ipc://{folder}/weights.sock"
        elements = sum(values.numel() for values in self.live.values())
        # loaded by the peer; also the target of plain copies, because a third set of
        # weights would not fit
        self.flat = torch.zeros(elements, dtype=torch.bfloat16)
        self.loaded = 0  # elements of the current sync

    @register(Dispatch.ONE_TO_ALL)
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

    @register(Dispatch.ONE_TO_ALL)
    def copy(self) -> None:
        """Copy the engine's bytes with one thread in the engine's process. This is the limit."""
        if not self.is_trainer:
            self._load(self.live.items(), is_last=True)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for _, values in weights:
            end = self.loaded + values.numel()
            self.flat[self.loaded : end].copy_(values.view(-1))
            self.loaded = end
        if is_last:
            self.loaded = 0
