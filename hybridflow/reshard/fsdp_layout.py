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
    experts = 1 + max((_expert(name) for name in tensors), default=-1)
    start, count = shard_rows(experts, rank, ranks)
    rows: dict[str, tuple[int, int]] = {}
    for name, shape in tensors.items():
        if (expert := _expert(name)) < 0:
            rows[name] = shard_rows(shape[0], rank, ranks)
        else:
            rows[name] = (0, shape[0] if start <= expert < start + count else 0)
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
        shape = tensors[name]
        if rows:
            local = (rows, *shape[1:])
            tail = (0,) * (len(shape) - 1)
            found.append(
                LocalTensor(name, local, (Piece(name, (start, *tail), (0, *tail), local),))
            )
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
