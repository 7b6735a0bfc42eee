"""Two processes of one host: ours over shared memory beside verl's bucketed transfer through shared memory, and a plain
copy."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from support import peer
from support.reshard_ranks import Ranks


class NoDevice:
    """In place of torch.cuda, which verl falls back to where no accelerator is: what it calls between buckets does
    nothing on CPU."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def empty_cache(self) -> None:
        """Nothing is cached."""


def load_peer() -> ModuleType:
    """verl's module by its path: its package imports vllm, the module does not."""
    folder = peer.install()
    path = Path(folder) / "verl" / "workers" / "rollout" / "vllm_rollout" / "bucketed_weight_transfer.py"
    spec = importlib.util.spec_from_file_location("peer_bucketed_weight_transfer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.get_torch_device = NoDevice
    module.is_support_ipc = lambda: False
    return module


class BucketRanks(Ranks):
    """Rank 0 is the trainer's, rank 1 the engine's."""

    def __init__(self, rank: int, folder: str, **arguments: Any) -> None:
        super().__init__(rank, **arguments)
        self.peer = load_peer()
        self.handle = f"ipc://{folder}/weights.sock"
        self.flat: torch.Tensor | None = None
        self.views: dict[str, torch.Tensor] = {}

    def peer_sync(self, bucket_mb: int) -> int:
        """verl: all parameters, each copied out of the bucket into a tensor that stays, as loading does."""
        if self.is_trainer:
            sender = self.peer.BucketedWeightSender(self.handle, bucket_size_mb=bucket_mb, use_shm=True)
            asyncio.run(sender.async_send_weights(self._weights()))
            return 0
        self._count = 0
        receiver = self.peer.BucketedWeightReceiver(self.handle, torch.device("cpu"), use_shm=True)
        receiver.receive_weights(self._load)
        return self._count

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.live.items()

    @torch.no_grad()
    def _load(self, weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for name, values in weights:
            if self.flat is None:
                self.flat = torch.zeros(sum(v.numel() for v in self.live.values()), dtype=self.dtype)
            if name not in self.views:
                begin = sum(view.numel() for view in self.views.values())
                self.views[name] = self.flat[begin : begin + values.numel()].view(values.shape)
            self.views[name].copy_(values)
            self._count += values.nbytes

    def copy(self) -> int:
        """The limit: a copy of the engine's bytes by one thread, within the engine's process."""
        if self.is_trainer:
            return 0
        for mine, other in self._pairs():
            other.copy_(mine)
        return sum(mine.nbytes for mine, _ in self._pairs())

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every engine buffer, and as much of the memory that the peer's tensors lie in: no third set of weights is
        needed."""
        assert self.flat is not None, "the peer's turn comes first"
        ends = list(accumulate(values.numel() for values in self.live.values()))
        return [
            (values.view(-1), self.flat[end - values.numel() : end])
            for values, end in zip(self.live.values(), ends, strict=True)
        ]
