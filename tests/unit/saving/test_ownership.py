"""Owners of the slices of an export: every element has one, and a wrong map is found before
anything is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.layout import Coordinates, LocalTensor
from hybridflow.saving.ownership import megatron_owners
from tests.models import MAP_MODELS, MAP_MOE
from tests.unit.models.map_cases import LAYOUTS, coordinates, hf_weights, local_weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MAP_MODELS)
def test_reading_every_owned_slice_gives_the_checkpoint(
    model: str, layout: tuple[int, int, int, int]
) -> None:
    """Write every owned piece from the rank's memory into the whole tensor: each element exactly
    once, each with its value."""
    family = family_of(MAP_MODELS[model])
    hf = hf_weights(family)
    ranks = coordinates(*layout)
    memory = [local_weights(family, at, hf) for at in ranks]
    written = {name: np.zeros(shape, np.int64) for name, shape in family.tensors().items()}
    times = {name: np.zeros(shape, np.int64) for name, shape in family.tensors().items()}
    owners = megatron_owners(family, ranks)
    assert owners.keys() == family.tensors().keys()
    for name, pieces in owners.items():
        # one stage writes a tensor
        assert len({ranks[owned.rank].pp_rank for owned in pieces}) == 1
        for owned in pieces:
            region = tuple(
                slice(a, a + n)
                for a, n in zip(owned.piece.source_start, owned.piece.shape, strict=True)
            )
            assert owned.piece.source == name
            written[name][region] = memory[owned.rank][owned.parameter][owned.piece.slices()]
            times[name][region] += 1
    for name, expected in hf.items():
        assert (times[name] == 1).all(), name
        np.testing.assert_array_equal(written[name], expected, err_msg=name)


def test_replicas_are_written_by_different_ranks() -> None:
    """Tensor-parallel copies of norms and data-parallel copies of everything: nobody sends much
    more than its share."""
    family = family_of(MAP_MODELS["dense"])
    # three data-parallel copies
    ranks = [Coordinates(tp, 2, pp, 2) for pp in range(2) for tp in range(2)] * 3
    sent = Counter[int]()
    for owned in (owned for pieces in megatron_owners(family, ranks).values() for owned in pieces):
        sent[owned.rank] += owned.piece.numel
    for stage in range(2):
        loads = [sent[rank] for rank, at in enumerate(ranks) if at.pp_rank == stage]
        biggest = max(
            piece.numel
            for rank, at in enumerate(ranks)
            for local in family.local_tensors(at)
            for piece in local.pieces
        )
        assert max(loads) - min(loads) <= biggest, loads
        assert min(loads) > 0


class Wrong:
    """A family whose map has one thing changed."""

    def __init__(self, change: Any, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.right = family_of(MAP_MOE)
        self.change = change
        self.shapes = shapes

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self.shapes or self.right.tensors()

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        return [self.change(local) for local in self.right.local_tensors(at)]


def on(name: str, change: Any) -> Any:
    """Apply `change` to the pieces of the local tensors whose name ends so."""
    return lambda local: (
        replace(local, pieces=tuple(change(local.pieces))) if local.name.endswith(name) else local
    )


def shifted(pieces: Any) -> Any:
    first = pieces[0]
    return (
        replace(first, source_start=(first.source_start[0] + 1, *first.source_start[1:])),
        *pieces[1:],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            on("linear_qkv.weight", lambda pieces: pieces[:-1]),
            "v_proj.* do not cover every element",
            id="piece-left-out",
        ),
        pytest.param(
            on("weight1", lambda pieces: (pieces[0], pieces[0])),
            "omits .*up_proj",
            id="up-is-gate",
        ),
        pytest.param(on("linear_qkv.weight", shifted), "q_proj", id="off-by-one-row"),
        pytest.param(
            on("router.weight", shifted), "mlp.gate.weight extends beyond", id="beyond-the-end"
        ),
        pytest.param(
            on("final_layernorm.weight", lambda _: ()),
            "omits .*model.norm.weight",
            id="tensor-left-out",
        ),
        pytest.param(
            on(
                "linear_proj.weight",
                lambda pieces: [replace(piece, source="model.o_proj") for piece in pieces],
            ),
            r"not in its checkpoint \['model.o_proj'\]",
            id="unknown-name",
        ),
        pytest.param(
            on(
                "linear_proj.weight",
                lambda pieces: [replace(piece, source_start=(0, 0)) for piece in pieces],
            ),
            "o_proj",
            id="half-twice",
        ),
    ],
)
def test_a_wrong_map_is_caught_before_anything_is_written(change: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        megatron_owners(Wrong(change), coordinates(2, 2, 2, 1))


def test_a_tensor_unknown_to_the_map_is_caught() -> None:
    shapes = {**family_of(MAP_MOE).tensors(), "model.layers.0.extra.bias": (3,)}
    with pytest.raises(ModelError, match=r"omits \['model.layers.0.extra.bias'\]"):
        megatron_owners(Wrong(lambda local: local, shapes), coordinates(1, 1, 1, 1))
