"""Text exchange between all ranks over a separate gloo group, so that a background thread can use
it while training uses the other groups.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """A process group of all ranks. All ranks must create it together and call `gather` in the same
    order."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long `gather` waits for the slowest rank, in seconds."""
        self.of = dist.group.WORLD
        self.world = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order. Raises RuntimeError if a rank has died or
        does not respond in time."""
        data, sizes = self._padded(text)
        texts = _like(data, sizes)
        dist.all_gather(texts, data, group=self.group)
        return _decoded(texts, sizes)

    def gather_on_first(self, text: str) -> list[str]:
        """Gather large texts (megabytes) on rank 0. Returns an empty list on the other ranks."""
        data, sizes = self._padded(text)
        texts = _like(data, sizes) if dist.get_rank() == 0 else None
        dist.gather(data, texts, dst=0, group=self.group)
        return _decoded(texts, sizes) if texts is not None else []

    def _padded(self, text: str) -> tuple[Tensor, list[int]]:
        """Return the text's bytes, padded to the length of the longest text, and the byte count of
        every rank's text."""
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        count = data.numel()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(counts, torch.tensor([count]), group=self.group)
        sizes = list(map(int, counts))
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[:count] = data
        return padded, sizes


def _like(data: Tensor, sizes: list[int]) -> list[Tensor]:
    """Allocate memory like `data` for every rank's text."""
    return [torch.empty_like(data) for _ in sizes]


def _decoded(texts: list[Tensor], sizes: list[int]) -> list[str]:
    decoded: list[str] = []
    for found, size in zip(texts, sizes, strict=True):
        data = bytes(found[:size].numpy())
        decoded.append(data.decode())
    return decoded


_shared: Exchange | None = None


def shared_exchange(timeout_s: float = 1800.0) -> Exchange:
    """Return the exchange that the training thread uses for loads and exports. The first call
    creates it with this timeout and must be made by all ranks.
    """
    global _shared
    if _shared is None or _shared.of is not dist.group.WORLD:  # a process may have changed worlds
        _shared = Exchange(timeout_s)
    return _shared
