"""Layouts of the map between Hugging Face and Megatron, and what each rank of them holds."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np

from hybridflow.models.layout import Coordinates

# (tensor, pipeline, expert, expert tensor)
LAYOUTS = [(1, 1, 1, 1), (2, 2, 2, 1), (4, 1, 1, 4), (1, 4, 1, 1), (2, 2, 4, 1), (4, 2, 2, 2)]


def coordinates(tensor: int, pipeline: int, expert: int, expert_tensor: int) -> list[Coordinates]:
    """A world that holds every combination of positions."""
    return [
        Coordinates(tp, tensor, pp, pipeline, ep, expert, etp, expert_tensor)
        for pp, tp, ep, etp in product(
            range(pipeline), range(tensor), range(expert), range(expert_tensor)
        )
    ]


def hf_weights(family: Any) -> dict[str, np.ndarray]:
    """Every element of the checkpoint its own number."""
    start = 1
    found = {}
    for name, shape in family.tensors().items():
        found[name] = np.arange(start, start + prod(shape), dtype=np.int64).reshape(shape)
        start += prod(shape)
    return found


def local_weights(family: Any, at: Coordinates, hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the rank at `at` holds, by the map; elements that no piece fills stay 0."""
    found = {}
    for local in family.local_tensors(at):
        found[local.name] = np.zeros(local.shape, np.int64)
        for piece in local.pieces:
            source = tuple(
                slice(start, start + size)
                for start, size in zip(piece.source_start, piece.shape, strict=True)
            )
            found[local.name][piece.slices()] = hf[piece.source][source]
    return found
