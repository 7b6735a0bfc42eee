"""The plan that brings every element of the checkpoint to a stage's leader once, and what happens when a map is
wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from hybridflow.errors import WeightSyncError
from hybridflow.models import family_of
from hybridflow.models.layout import Coordinates, LocalTensor
from hybridflow.reshard.plan import StagePlan, plan_stages
from tests.models import FAMILIES, MAP_MODELS, MAP_MOE
from tests.unit.models.map_cases import LAYOUTS, coordinates, hf_weights, local_weights

BYTES = 4


def pieces_of(plans: list[StagePlan]) -> list[Any]:
    return [owned for plan in plans for bucket in plan.buckets for owned in bucket.pieces]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MAP_MODELS)
def test_executing_the_plan_by_hand_gives_the_checkpoint(model: str, layout: tuple[int, int, int, int]) -> None:
    """Write every owned piece from the rank's memory into the whole tensor: each element exactly once, each with its
    value."""
    family = family_of(MAP_MODELS[model])
    hf, ranks = hf_weights(family), coordinates(*layout)
    memory = [local_weights(family, at, hf) for at in ranks]
    written = {name: np.zeros(shape, np.int64) for name, shape in family.tensors().items()}
    times = {name: np.zeros(shape, np.int64) for name, shape in family.tensors().items()}
    plans = plan_stages(family, ranks, 1 << 10, BYTES)
    for plan in plans:
        assert ranks[plan.leader].pp_rank == plan.stage
        for bucket in plan.buckets:
            for owned in bucket.pieces:
                assert ranks[owned.rank].pp_rank == plan.stage
                assert owned.piece.source in dict(bucket.tensors)
                region = tuple(
                    slice(a, a + n) for a, n in zip(owned.piece.source_start, owned.piece.shape, strict=True)
                )
                written[owned.piece.source][region] = memory[owned.rank][owned.parameter][owned.piece.slices()]
                times[owned.piece.source][region] += 1
    for name, expected in hf.items():
        assert (times[name] == 1).all(), name
        np.testing.assert_array_equal(written[name], expected, err_msg=name)
    planned = Counter(name for plan in plans for bucket in plan.buckets for name, _ in bucket.tensors)
    assert planned == Counter(family.tensors().keys())  # each tensor in one bucket of one stage


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 10, 1 << 14, 1 << 30])
def test_buckets_are_bounded(bucket_bytes: int) -> None:
    family = family_of(MAP_MOE)
    plans = plan_stages(family, coordinates(2, 2, 2, 1), bucket_bytes, BYTES)
    buckets = [bucket for plan in plans for bucket in plan.buckets]
    assert all(bucket.numel * BYTES <= bucket_bytes or len(bucket.tensors) == 1 for bucket in buckets)
    assert sum(bucket.numel for bucket in buckets) == sum(prod(shape) for shape in family.tensors().values())
    if bucket_bytes == 1 << 30:
        assert len(buckets) == 2  # one a stage: nothing is split without need


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 14])
def test_what_an_engine_joins_travels_in_one_bucket(bucket_bytes: int) -> None:
    """DeepSeek's two down projections: SGLang's loader drops one that comes without the other."""
    family = family_of(FAMILIES["deepseek_v3"])
    plans = plan_stages(family, coordinates(2, 2, 2, 1), bucket_bytes, BYTES)
    together = 0
    for bucket in (bucket for plan in plans for bucket in plan.buckets):
        names = {name for name, _ in bucket.tensors}
        first = {name.replace("q_a_proj", "kv_a_proj_with_mqa") for name in names if ".q_a_proj." in name}
        assert first == {name for name in names if "kv_a_proj_with_mqa" in name}
        together += len(first)
    assert together == 4
    planned = [name for plan in plans for bucket in plan.buckets for name, _ in bucket.tensors]
    assert sorted(planned) == sorted(family.tensors())


def test_replicas_are_sent_by_different_ranks() -> None:
    """Tensor-parallel copies of norms and data-parallel copies of everything: nobody sends much more than its share."""
    family = family_of(MAP_MODELS["dense"])
    ranks = [Coordinates(tp, 2, pp, 2) for pp in range(2) for tp in range(2)] * 3  # three data-parallel copies
    sent = Counter[int]()
    for owned in pieces_of(plan_stages(family, ranks, 1 << 20, BYTES)):
        sent[owned.rank] += owned.piece.numel
    for stage in range(2):
        loads = [sent[rank] for rank, at in enumerate(ranks) if at.pp_rank == stage]
        biggest = max(
            piece.numel for rank, at in enumerate(ranks) for local in family.local_tensors(at) for piece in local.pieces
        )
        assert max(loads) - min(loads) <= biggest, loads
        assert min(loads) > 0


class Wrong:
    """A family whose map has one thing changed."""

    def __init__(self, change: Any, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.right, self.change, self.shapes = family_of(MAP_MOE), change, shapes

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return self.shapes or self.right.tensors()

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        return [self.change(local) for local in self.right.local_tensors(at)]


def on(name: str, change: Any) -> Any:
    """Apply `change` to the pieces of the local tensors whose name ends so."""
    return lambda local: replace(local, pieces=tuple(change(local.pieces))) if local.name.endswith(name) else local


def shifted(pieces: Any) -> Any:
    first = pieces[0]
    return (replace(first, source_start=(first.source_start[0] + 1, *first.source_start[1:])), *pieces[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            on("linear_qkv.weight", lambda pieces: pieces[:-1]),
            "v_proj.* do not cover every element",
            id="piece-left-out",
        ),
        pytest.param(on("weight1", lambda pieces: (pieces[0], pieces[0])), "leaves out .*up_proj", id="up-is-gate"),
        pytest.param(on("linear_qkv.weight", shifted), "q_proj", id="off-by-one-row"),
        pytest.param(on("router.weight", shifted), "mlp.gate.weight reaches beyond", id="beyond-the-end"),
        pytest.param(
            on("final_layernorm.weight", lambda _: ()), "leaves out .*model.norm.weight", id="tensor-left-out"
        ),
        pytest.param(
            on("linear_proj.weight", lambda pieces: [replace(piece, source="model.o_proj") for piece in pieces]),
            r"not in its checkpoint \['model.o_proj'\]",
            id="unknown-name",
        ),
        pytest.param(
            on("linear_proj.weight", lambda pieces: [replace(piece, source_start=(0, 0)) for piece in pieces]),
            "o_proj",
            id="half-twice",
        ),
    ],
)
def test_a_wrong_map_is_caught_before_anything_is_sent(change: Any, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        plan_stages(Wrong(change), coordinates(2, 2, 2, 1), 1 << 20, BYTES)


def test_a_tensor_unknown_to_the_map_is_caught() -> None:
    shapes = {**family_of(MAP_MOE).tensors(), "model.layers.0.extra.bias": (3,)}
    with pytest.raises(WeightSyncError, match=r"leaves out \['model.layers.0.extra.bias'\]"):
        plan_stages(Wrong(lambda local: local, shapes), coordinates(1, 1, 1, 1), 1 << 20, BYTES)
