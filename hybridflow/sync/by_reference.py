"""In-process weight transfer: tensors are copied directly from the trainer to an engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridflow.reshard.layout import Catalog, RankLayout
from hybridflow.sync.staging import rectangle


@torch.no_grad()
def copy_weights(
    layout: RankLayout,
    catalog: Catalog,
    held: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
) -> int:
    """Copy every rectangle from the single trainer rank into full tensors. Returns the number of
    bytes written.

    Args:
        layout, held: the trainer rank's layout, and its tensors keyed by the layout's buffer names.
        target: one tensor per name in the catalog.
    """
    written = 0
    for number in range(len(layout.tensor)):
        index = int(layout.tensor[number])
        if index < 0:  # padding rows
            continue
        source = held[layout.names[int(layout.buffer[number])]]
        size = layout.size[number]
        there = rectangle(target[catalog.names[index]], layout.start[number], size)
        there.copy_(rectangle(source, layout.local[number], size))
        written += there.nbytes
    return written
