"""A weight transfer within one process: from the trainer's tensors straight into an engine's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hybridflow.reshard.layout import DIMS, Catalog, RankLayout


@torch.no_grad()
def copy_weights(
    layout: RankLayout, catalog: Catalog, held: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]
) -> int:
    """Write every rectangle of the only trainer rank into whole tensors; returns the bytes written.

    Args:
        layout, held: what the rank holds, and its tensors by the names there.
        target: a tensor for each name of the catalog.
    """
    written = 0
    for number in range(len(layout.tensor)):
        index = int(layout.tensor[number])
        if index < 0:  # rows that fill a tensor up
            continue
        source = _in_three(held[layout.names[int(layout.buffer[number])]])
        size = layout.size[number]
        there = _in_three(target[catalog.names[index]])[_region(layout.start[number], size)]
        there.copy_(source[_region(layout.local[number], size)])
        written += there.nbytes
    return written


def _in_three(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[(None,) * (DIMS - tensor.dim())]


def _region(start: np.ndarray, size: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(int(first), int(first + count)) for first, count in zip(start, size, strict=True))
