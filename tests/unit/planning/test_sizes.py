"""The planner counts what a run holds: every rank's tensors by the map, every engine's by its
layout."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from hybridflow.config.schema import LoraConfig
from hybridflow.models import family_of
from hybridflow.models.layout import Coordinates
from hybridflow.models.lora_targets import is_adapted, is_routed, target_of, targets_of
from hybridflow.models.published import published
from hybridflow.models.scalar_head import TOKENS, ScalarHead
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.generation import Engine
from hybridflow.planning.sizes import (
    EXPERTS,
    adapter_numbers,
    chunk_layers,
    decoder_of,
    layer_shapes,
    stage_numbers,
)
from hybridflow.planning.training import Cut, Practice, Training
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import rank_tensors
from tests.models import FAMILIES

CUTS: list[tuple[str, dict[str, Any]]] = [
    # tied: the last stage has a copy of the embedding
    ("qwen3-0.6b", {"tp_size": 2, "pp_size": 4}),
    ("qwen2.5-7b", {"tp_size": 4, "pp_size": 2, "vpp_size": 7}),
    ("mixtral-8x7b", {"tp_size": 2, "pp_size": 4, "vpp_size": 4, "ep_size": 8, "etp_size": 1}),
    ("moonlight-16b-a3b", {"tp_size": 2, "pp_size": 3, "ep_size": 8}),
    (
        "qwen3-235b-a22b",
        {
            "tp_size": 2,
            "pp_size": 8,
            "ep_size": 8,
            "first_stage_layers": 11,
            "last_stage_layers": 11,
        },
    ),
    (
        "qwen3-235b-a22b",
        {"pp_size": 8, "vpp_size": 4, "ep_size": 32, "layers_per_stage": (2, *[3] * 30, 2)},
    ),
    ("glm-4.5-air", {"tp_size": 4, "pp_size": 2, "ep_size": 16, "etp_size": 2}),
]
# GFLOP a token, forward and backward, causal: counted by others for published runs
GFLOP = [
    *(("llama-3.1-70b", 4096, 433.1), ("llama-3.1-405b", 8192, 2524), ("qwen3-32b", 4096, 204.8)),
    *(
        ("qwen3-30b-a3b", 4096, 23.08),
        ("qwen3-235b-a22b", 4096, 148.3),
        ("qwen3-235b-a22b", 131072, 735.0),
    ),
    *(("deepseek-v3", 4096, 250.4), ("mixtral-8x7b", 4096, 79.7), ("mixtral-8x22b", 4096, 242.2)),
]


@pytest.mark.parametrize(("model", "cut"), CUTS)
def test_every_stage_has_the_numbers_of_its_tensors(model: str, cut: dict[str, Any]) -> None:
    decoder = decoder_of(published(model))
    for stage in range(cut["pp_size"]):
        at = Coordinates(pp_rank=stage, **cut)
        for family, scalar in ((decoder, False), (ScalarHead(decoder, TOKENS), True)):
            expert = dense = 0
            for local in rank_tensors(family, at):
                if EXPERTS in local.name.replace("chunk", ".chunk"):
                    expert += prod(local.shape)
                elif not local.is_buffer:
                    dense += prod(local.shape)
            found = stage_numbers(decoder, at, scalar)
            assert (found.dense, found.expert) == (dense, expert)
        assert [list(chunk_layers(decoder, c)) for c in at.virtual_stages()] == [
            list(c.layers(decoder.num_layers)) for c in at.virtual_stages()
        ]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cut"), CUTS)
def test_every_stage_has_the_adapters_of_its_weights(model: str, cut: dict[str, Any]) -> None:
    """The oracle: the factors that a rank of a run creates."""
    decoder = decoder_of(published(model))
    for targets in ((), targets_of(decoder)):
        lora = LoraConfig(rank=8, targets=targets)
        for stage in range(cut["pp_size"]):
            at = Coordinates(pp_rank=stage, **cut)
            found = adapter_numbers(decoder, at, lora)
            factors = {False: 0, True: 0}
            for local in rank_tensors(decoder, at):
                if is_adapted(local, targets):
                    rows, columns = local.shape
                    factors[is_routed(target_of(local))] += 8 * (rows + columns)
            assert (found.factors.dense, found.factors.expert) == (factors[False], factors[True])
            assert found.adapted.total > 8 * found.factors.total


def test_adapters_take_the_place_of_gradients_and_optimizer_state() -> None:
    decoder = decoder_of(published("qwen3-30b-a3b"))
    cut = Cut(8, expert=8)
    whole, some = (
        Training(decoder, cut, DEVICES["H100"], lora=lora)
        for lora in (None, LoraConfig(rank=16, targets=("experts.linear_fc1",)))
    )
    factors = some.trained[0].total
    # fc1 of 128 experts on 8 ranks in 48 layers: 2048 -> 2 * 768
    assert factors == 48 * 16 * 16 * (2048 + 2 * 768)
    assert some.weights(0) == whole.weights(0) + 2 * factors
    assert some.gradients(0) == 4 * factors
    assert some.optimizer(0) == 12 * factors
    assert some.merged_weights(0) == 2 * 48 * 16 * 2048 * 2 * 768
    seconds = [one.update_seconds(4096, 4, 1024) for one in (some, whole)]
    assert 0.5 < seconds[0] / seconds[1] < 1


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("qwen3-0.6b", EngineShape(2)),
        ("moonlight-16b-a3b", EngineShape(4, expert=2, data_attention=2)),
        ("mixtral-8x7b", EngineShape(2, pipeline=2)),
    ],
)
def test_an_engine_has_the_numbers_of_its_layout(model: str, shape: EngineShape) -> None:
    decoder = decoder_of(published(model))
    held = [
        int(rank.shapes.prod(axis=1).sum())
        for rank in engine_layout(decoder, [shape], "bfloat16").classes
    ]
    assert Engine(decoder, shape, DEVICES["H100"]).numbers.total == max(held)


@pytest.mark.parametrize(("model", "length", "expected"), GFLOP)
def test_operations_of_a_token(model: str, length: int, expected: float) -> None:
    training = Training(decoder_of(published(model)), Cut(1), DEVICES["H100"])
    assert training.flops(1, length) / 1e9 == pytest.approx(expected, rel=2e-3)


def test_heads_for_several_tokens_ahead_are_counted_once() -> None:
    hf: dict[str, Any] = published("deepseek-v3")
    plain = decoder_of(hf)
    more = decoder_of(hf, mtp=True)
    extra = stage_numbers(more, Coordinates()).total - stage_numbers(plain, Coordinates()).total
    shapes = family_of(hf, mtp=True).tensors()
    of_head = sum(
        prod(s)
        for name, s in shapes.items()
        if name.startswith("model.layers.61.") and "correction" not in name
    )
    assert extra == of_head
    assert len(layer_shapes(more)) == 61


def test_heads_that_are_trained_next_to_the_model_cost_an_update_and_no_scoring() -> None:
    hf: dict[str, Any] = published("deepseek-v3")
    cut = Cut(16, 2, 8)
    plain, trained = (
        Training(decoder_of(hf, mtp=on), cut, DEVICES["H100"], practice=Practice(trains_heads=on))
        for on in (False, True)
    )
    last = cut.pipeline - 1
    copy = 129280 * 7168 // 2
    heads = trained.numbers[last].total - plain.numbers[last].total - copy
    assert 11e9 < heads < 12e9  # each rank has whole experts
    # the copy of the embedding has neither gradients nor optimizer state
    assert trained.weights(last) - plain.weights(last) == 2 * (heads + copy)
    assert trained.gradients(last) - plain.gradients(last) == 4 * heads
    experts = trained.numbers[last].expert - plain.numbers[last].expert  # on two ranks each
    assert trained.optimizer(last) - plain.optimizer(last) == 12 * (heads - experts / 2)
    for stage in range(last):
        assert trained.static(stage) == plain.static(stage)
        assert trained.stage_seconds(stage, 4096, 2048) == plain.stage_seconds(stage, 4096, 2048)
    before, after = (one.stage_seconds(last, 4096, 2048) for one in (plain, trained))
    assert after[0] == before[0] and after[1] > before[1]
    assert trained.activations(last, 4096, 8) >= plain.activations(last, 4096, 8)
    # a layer with its projection, and the output layer once more
    share = trained.flops(1, 2048) / plain.flops(1, 2048) - 1
    assert 1 / 61 < share < 3 / 61


def test_an_engine_that_drafts_holds_the_head_and_its_cache() -> None:
    hf: dict[str, Any] = published("deepseek-v3")
    shape = EngineShape(16, expert=16)
    plain, drafting = (
        Engine(decoder_of(hf, mtp=mtp), shape, DEVICES["H200"]) for mtp in (False, True)
    )
    assert plain.draft.total == 0
    assert drafting.numbers == plain.numbers
    # a layer has 256 experts of 3 matrices, 16 on a rank; the projection is whole on every rank
    assert drafting.draft.expert == 16 * 3 * 7168 * 2048
    assert drafting.draft.dense > 2 * 7168 * 7168
    assert drafting.weights - plain.weights == 2 * drafting.draft.total
    assert drafting.kv_token / plain.kv_token == 62 / 61
    assert 0 < drafting.kv_room < plain.kv_room


def test_a_delta_net_costs_the_same_at_every_length() -> None:
    hf = FAMILIES["qwen3_next"]
    decoder = decoder_of(hf)
    linear, attention = layer_shapes(decoder)[2:]
    assert (linear.core, linear.kv) == (0, 0)
    assert (attention.core, attention.kv, attention.state) == (4 * 8 * 16, 2 * 4 * 16, 0)
    assert linear.state == 8 * 16 * 12  # key size x value heads x value size
    # projections, the convolution of 4 tokens, output, and three products with each head's state
    rows = 2 * 64 + 192
    weights = (rows + 192 + 2 * 16) * 64 + rows * 4 + 64 * 192
    assert sum(one.flops for one in linear.attention) == 2 * (weights + 3 * 16 * 8 * 12)
    # queries are twice as wide: each has a gate
    weights = 64 * (2 * 128 + 2 * 64) + 64 * 128
    assert sum(one.flops for one in attention.attention) == 2 * weights


def test_windows_bound_pairs_and_what_a_step_reads() -> None:
    """The oracle: the pairs of a causal mask with the window, token by token."""
    hf = {**FAMILIES["gpt_oss"], "sliding_window": 16}
    decoder = decoder_of(hf)
    sliding, full = layer_shapes(decoder)[:2]
    assert (sliding.window, full.window) == (16, 0)
    assert replace(sliding, window=0) == full
    for length in (1, 5, 16, 17, 100, 1000):
        tokens = np.arange(1, length + 1)
        # a token's own key counts half, as in the pairs of full attention, length / 2
        for shape, seen in ((sliding, np.minimum(tokens, 16)), (full, tokens)):
            assert abs(shape.pairs(length) - float(seen.mean())) <= 0.5
    assert full.pairs(100) == 50 and sliding.pairs(16) == 8 and sliding.pairs(8) == 4
    engine = Engine(decoder, EngineShape(), DEVICES["H100"])
    assert engine.kv_read(16) == 16 * engine.kv_token
    assert engine.kv_read(1016) == engine.kv_read(16) + 1000 * engine.kv_token / 2
    wide = Engine(decoder_of({**hf, "sliding_window": 1000}), EngineShape(), DEVICES["H100"])
    assert wide.kv_token == engine.kv_token
    assert wide.step_seconds(64, 900) > engine.step_seconds(64, 900)
    training, attending = (Training(one.decoder, Cut(1), DEVICES["H100"]) for one in (engine, wide))
    saved = attending.flops(1, 1000) - training.flops(1, 1000)
    assert saved == pytest.approx(3 * 2 * sliding.core * (500 - sliding.pairs(1000)))


def test_states_of_requests_leave_less_room_for_their_cache() -> None:
    decoder = decoder_of(FAMILIES["qwen3_next"])
    few, many = (
        Engine(decoder, EngineShape(tensor=2), DEVICES["H100"], running=running)
        for running in (1, 1001)
    )
    each = 3 * 8 * 16 * 12 * 4 / 2  # three layers, float32, two ranks
    assert few.state_request == each
    assert (few.kv_room - many.kv_room) * few.kv_token == pytest.approx(1000 * each)
    assert few.step_seconds(64, 100) > 0
