"""A weight transfer within one process: from the trainer's tensors straight into an engine's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridflow.reshard.layout import Catalog, RankLayout
from hybridflow.sync.staging import rectangle


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
        source, size = held[layout.names[int(layout.buffer[number])]], layout.size[number]
        there = rectangle(target[catalog.names[index]], layout.start[number], size)
        there.copy_(rectangle(source, layout.local[number], size))
        written += there.nbytes
    return written
