"""Exchange of short texts between all ranks over a gloo group of its own, which a background thread may use while
training uses the other groups."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist


class Exchange:
    """A group of all ranks, which create it together and call `gather` in the same order."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: seconds that a rank waits for the slowest one in `gather`."""
        self.world = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def gather(self, text: str) -> list[str]:
        """Every rank's text, by rank. RuntimeError when a rank has died or is late."""
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.group)
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        texts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(texts, padded, group=self.group)
        return [bytes(found[: int(size)].numpy()).decode() for found, size in zip(texts, sizes, strict=True)]


_shared: Exchange | None = None


def shared_exchange(timeout_s: float = 1800.0) -> Exchange:
    """The exchange for loads and exports on the training's thread. The first call, which is collective, creates it and
    sets its timeout."""
    global _shared
    if _shared is None or _shared.world != dist.get_world_size():
        _shared = Exchange(timeout_s)
    return _shared
