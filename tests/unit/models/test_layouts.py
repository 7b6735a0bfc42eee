"""Where Megatron's stages and ranks stand: virtual stages, uneven pipelines, cuts through KV
groups, sizes that do not divide."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.errors import ModelError
from hybridflow.models.layout import Coordinates, ParallelShape, stacked_rows
from hybridflow.reshard.layout import rank_tensors
from tests.unit.reshard import reshard_cases as cases


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"pp_size": 2}, [[range(4)], [range(4, 8)]]),
        ({"pp_size": 2, "vpp_size": 2}, [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]),
        ({"pp_size": 3, "first_stage_layers": 4}, [[range(4)], [range(4, 6)], [range(6, 8)]]),
        ({"pp_size": 3, "last_stage_layers": 2}, [[range(3)], [range(3, 6)], [range(6, 8)]]),
        (
            {"pp_size": 3, "first_stage_layers": 1, "last_stage_layers": 3},
            [[range(1)], [range(1, 5)], [range(5, 8)]],
        ),
        (
            {"pp_size": 2, "vpp_size": 2, "first_stage_layers": 2, "last_stage_layers": 6},
            [[range(1), range(4, 5)], [range(1, 4), range(5, 8)]],
        ),
        (
            {"pp_size": 2, "first_stage_layers": 5, "last_stage_layers": 3},
            [[range(5)], [range(5, 8)]],
        ),
        ({"pp_size": 3, "layers_per_stage": (0, 5, 3)}, [[range(0)], [range(5)], [range(5, 8)]]),
        (
            {"pp_size": 2, "vpp_size": 2, "layers_per_stage": (1, 2, 4, 1)},
            [[range(1), range(3, 7)], [range(1, 3), range(7, 8)]],
        ),
    ],
)
def test_layers_of_each_virtual_stage(sizes: dict[str, Any], layers: list[list[range]]) -> None:
    stages = [Coordinates(pp_rank=rank, **sizes) for rank in range(sizes["pp_size"])]
    assert [[chunk.layers(8) for chunk in at.virtual_stages()] for at in stages] == layers


def test_experts_of_each_rank() -> None:
    ranks = [Coordinates(ep_rank=rank, ep_size=2) for rank in range(2)]
    assert [list(at.experts(6)) for at in ranks] == [[0, 1, 2], [3, 4, 5]]
    assert list(Coordinates().experts(3)) == [0, 1, 2]


def test_coordinates_travel_as_integers() -> None:
    at = Coordinates(1, 2, 1, 2, vpp_rank=1, vpp_size=2, first_stage_layers=3)
    assert Coordinates.of_row(at.row()) == at
    listed = Coordinates(1, 2, 1, 2, layers_per_stage=(3, 1))
    assert Coordinates.of_row(listed.row()) == listed
    assert all(type(number) is int for number in listed.row())
    assert at.is_last_stage
    assert not Coordinates(pp_rank=1, pp_size=2, vpp_rank=0, vpp_size=2).is_last_stage


def test_a_rank_with_virtual_stages_holds_all_its_chunks() -> None:
    names = [
        t.name for t in rank_tensors(cases.decoder_of("llama"), Coordinates(pp_size=2, vpp_size=2))
    ]
    assert names[0] == "chunk0.embedding.word_embeddings.weight"
    assert "chunk1.decoder.layers.0.self_attention.linear_qkv.weight" in names
    assert not any("output_layer" in name for name in names)


def test_ranks_stand_in_megatrons_order() -> None:
    ranks = ParallelShape(16, tensor=2, pipeline=2, expert=2, expert_tensor=2).coordinates()
    assert [(r.tp_rank, r.pp_rank, r.ep_rank, r.etp_rank) for r in ranks[:5]] == [
        (0, 0, 0, 0),
        (1, 0, 0, 1),
        (0, 0, 1, 0),
        (1, 0, 1, 1),
        (0, 0, 0, 0),
    ]
    assert [r.pp_rank for r in ranks] == [0] * 8 + [1] * 8


def test_a_cut_may_go_through_a_part() -> None:
    local = stacked_rows("w", [("a", 0, 6), ("b", 0, 2)], (3,), 1, 2)
    assert local.shape == (4, 3)
    assert [(p.source, p.source_start, p.local_start, p.shape) for p in local.pieces] == [
        ("a", (4, 0), (0, 0), (2, 3)),
        ("b", (0, 0), (2, 0), (2, 3)),
    ]


@pytest.mark.parametrize(
    ("model", "at", "message"),
    [
        (
            "llama",
            Coordinates(pp_size=3),
            (
                "num_hidden_layers is 4, which is not divisible by actor.parallel.pipeline 3; choose a "
                "divisor of 4"
            ),
        ),
        (
            "llama",
            Coordinates(tp_size=3),
            "num_attention_heads is 8, which is not divisible by actor.parallel.tensor 3",
        ),
        (
            "llama",
            Coordinates(pp_size=2, vpp_size=3),
            "layers of pipeline stage 0 is 2, which is not divisible by .*virtual_pipeline 3",
        ),
        (
            "llama",
            Coordinates(pp_size=4, first_stage_layers=2),
            "without the 2 of the first .* is 2, which is not divisible by .* 3",
        ),
        ("llama", Coordinates(first_stage_layers=2), "leave no layers for the other stages"),
        (
            "llama",
            Coordinates(pp_size=3, layers_per_stage=(1, 3)),
            r"\[1, 3\] has 2 numbers, but .* 3 stages",
        ),
        (
            "llama",
            Coordinates(pp_size=2, vpp_size=2, layers_per_stage=(1, 3)),
            "x virtual_pipeline 2 has 4 stages",
        ),
        (
            "llama",
            Coordinates(pp_size=2, layers_per_stage=(1, 2)),
            "adds up to 3 layers, but num_hidden_layers is 4",
        ),
        (
            "llama",
            Coordinates(pp_size=3, layers_per_stage=(2, 0, 2)),
            "leaves stage 1 without a layer",
        ),
        (
            "llama",
            Coordinates(pp_size=2, first_stage_layers=1, layers_per_stage=(1, 3)),
            "already lists the layers of every stage; set first_stage_layers 1",
        ),
        (
            "qwen3_moe",
            Coordinates(ep_size=3),
            "num_experts is 8, which is not divisible by actor.parallel.expert 3",
        ),
        ("qwen3_moe", Coordinates(etp_size=3), "moe_intermediate_size is 32"),
        ("glm4_moe", Coordinates(tp_size=64), "num_attention_heads is 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(model: str, at: Coordinates, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cases.decoder_of(model).local_tensors(at)
