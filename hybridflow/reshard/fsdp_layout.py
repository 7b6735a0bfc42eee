"""The trainer's layout under FSDP2: parameters with their Hugging Face names, sharded by rows
across all ranks.

FSDP2 splits dimension 0 as `torch.chunk` does: every rank gets ceil(rows / ranks) rows, except that
the last ranks get fewer or none. A rank's shard is one rectangle of one HF tensor, so slices are
sent directly from shards without gathering a parameter.

transformers stacks a layer's experts in two tensors [experts, ...]. FSDP2 therefore assigns whole
experts to ranks by the same rule, and each expert's matrix is one HF tensor
(`models.causal.checkpoint_views`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from hybridflow.models import Family
from hybridflow.models.layout import LocalTensor, Piece
from hybridflow.reshard.layout import Catalog, Layout, RankLayout


def shard_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (first row, number of rows) of a rank's shard of a tensor with `rows` rows."""
    share = -(-rows // ranks)
    start = min(rank * share, rows)
    return start, min(share, rows - start)


def fsdp_rows(
    tensors: Mapping[str, tuple[int, ...]], rank: int, ranks: int
) -> dict[str, tuple[int, int]]:
    """Return (first row, number of rows) of a rank's shard of each HF tensor. `tensors` contains
    all tensors of the model."""
    last = max(map(_expert, tensors), default=-1)
    start, count = shard_rows(last + 1, rank, ranks)
    rows: dict[str, tuple[int, int]] = {}
    for name, shape in tensors.items():
        expert = _expert(name)
        if expert < 0:
            rows[name] = shard_rows(shape[0], rank, ranks)
        elif start <= expert < start + count:
            rows[name] = (0, shape[0])
        else:
            rows[name] = (0, 0)
    return rows


def _expert(name: str) -> int:
    """Return the index of the routed expert to which an HF tensor belongs, or -1."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else -1


def fsdp_tensors(family: Family, rank: int, ranks: int) -> list[LocalTensor]:
    """Return a rank's tensors, omitting tensors that have no rows on this rank."""
    found = []
    tensors = family.tensors()
    for name, (start, rows) in fsdp_rows(tensors, rank, ranks).items():
        if rows:
            _, *widths = tensors[name]
            local = (rows, *widths)
            tail = (0,) * len(widths)
            piece = Piece(name, (start, *tail), (0, *tail), local)
            found.append(LocalTensor(name, local, (piece,)))
    return found


def fsdp_layout(family: Family, ranks: int, dtype: str, catalog: Catalog | None = None) -> Layout:
    """Build the trainer's layout. Every rank is a separate class.

    Args:
        dtype: dtype of the shards (float32, regardless of the compute dtype).
    """
    index = (catalog or Catalog.of(family.tensors())).index()
    layouts = []
    for rank in range(ranks):
        layouts.append(RankLayout.of(fsdp_tensors(family, rank, ranks), index, dtype))
    classes = tuple(layouts)
    return Layout(classes, np.arange(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64))
