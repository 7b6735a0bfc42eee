"""Host memory that holds one consistent copy of this rank's state while it is written: allocated once, reused by every
save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hybridflow.device.platform import Platform

_ALIGN = 64


class Staging:
    """One buffer, pinned where tensors come from a GPU. It grows when a later state is larger and is never given
    back."""

    def __init__(self) -> None:
        self._platform = Platform.detect()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._buffer.numel()

    def copy(self, tensors: Sequence[Any]) -> list[Any]:
        """The same rectangles (dataclasses with `data`) over a copy of their data, taken now. Valid until the next
        call.

        Each copy has a storage of its own that ends where the tensor ends, since `torch.save` writes whole storages.
        """
        sizes = [-(-tensor.data.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
        if sum(sizes) > self.size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first: never both
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._platform.kind == "cuda")
        memory, start, copies = self._buffer.numpy(), 0, []
        for tensor, size in zip(tensors, sizes, strict=True):
            source = tensor.data
            if source.numel():
                target = torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=start).view(
                    source.shape
                )
                target.copy_(source, non_blocking=True)
            else:
                target = torch.empty_like(source, device="cpu")
            copies.append(replace(tensor, data=target))
            start += size
        self._platform.synchronize()
        return copies
