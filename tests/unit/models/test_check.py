"""The check before a run and the layouts of its ranks agree: what passes can be cut, what cannot be
cut is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import derived
from hybridflow.config.check import problems as config_problems
from hybridflow.config.load import load_config
from hybridflow.config.schema import ParallelConfig
from hybridflow.errors import ModelError
from hybridflow.models.check import check, check_cut, check_fsdp, problems
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import family_of
from hybridflow.models.layout import Coordinates, ParallelShape
from hybridflow.models.published import published
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.job import cut_of
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.training import Training
from tests.models import FAMILIES
from tests.unit.random_sizes import PARTS, draw_sizes


def ranks(parallel: ParallelConfig) -> Iterator[Coordinates]:
    """The coordinates of every (virtual) stage of every rank."""
    etp = derived.expert_tensor_size(parallel)
    vpp = derived.virtual_pipeline_size(parallel)
    sizes = (parallel.tensor, parallel.pipeline, parallel.expert, etp, vpp)
    for tp, pp, ep, etp_rank, chunk in itertools.product(*map(range, sizes)):
        uneven = (
            parallel.first_stage_layers,
            parallel.last_stage_layers,
            parallel.layers_per_stage,
        )
        yield Coordinates(
            tp, sizes[0], pp, sizes[1], ep, sizes[2], etp_rank, etp, chunk, vpp, *uneven
        )


def is_whole(hf: Any, parallel: ParallelConfig) -> bool:
    """Whether the ranks' layouts, made without the check, hold every element of every tensor."""
    stages = parallel.pipeline * derived.virtual_pipeline_size(parallel)
    if len(parallel.layers_per_stage or ()) > stages:
        return False  # layers of stages that no rank has, even if there are none
    family: Any = family_of(hf)
    family.check = lambda at: None
    found: dict[str, set[Any]] = {}
    try:
        for at in ranks(parallel):
            for local in family.local_tensors(at):
                for piece in local.pieces:
                    found.setdefault(piece.source, set()).add(piece.region)
    except (ValueError, ZeroDivisionError, IndexError):
        return False
    held = {name: sum(prod(shape) for _, _, shape in regions) for name, regions in found.items()}
    return held == {name: prod(shape) for name, shape in family.tensors().items()}


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], ParallelConfig]:
    """A tiny model of any family with some sizes changed, and parallel sizes that may or may not
    fit."""
    hf = draw_sizes(draw)
    experts = bool(derived.num_experts(hf))
    return hf, ParallelConfig(
        tensor=draw(PARTS),
        pipeline=draw(st.sampled_from([1, 2, 3, 4])),
        first_stage_layers=draw(st.sampled_from([0, 0, 1, 2])),
        last_stage_layers=draw(st.sampled_from([0, 0, 1])),
        layers_per_stage=draw(
            st.sampled_from(
                [(), (), (), (1, 3), (2, 1), (4, 0), (0, 2, 2), (1, 0, 3), (1, 1, 1, 1)]
            )
        ),
        virtual_pipeline=draw(st.sampled_from([None, 2])),
        expert=draw(PARTS) if experts else 1,
        expert_tensor=draw(st.sampled_from([None, 1, 2, 3])) if experts else None,
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_passes_can_be_cut_and_what_is_refused_cannot(
    case: tuple[dict[str, Any], ParallelConfig],
) -> None:
    hf, parallel = case
    try:
        check_cut(hf, parallel)
    except ModelError as error:
        # heads are refused by Megatron even where their rows could be divided; two ways to say the
        # same layers, and stages of nothing, are refused though they could be followed
        by_choice = (
            "heads",
            "q, k and v",
            "already lists the layers",
            "without a layer",
            "leave no layers",
        )
        assert any(part in str(error) for part in by_choice) or not is_whole(hf, parallel), str(
            error
        )
    else:
        assert is_whole(hf, parallel), "passes, and the ranks do not hold the whole model"


@pytest.mark.parametrize(
    ("model", "pipeline", "first", "last", "layers"),
    [
        ("deepseek-v3", 16, 3, 2, [3, *[4] * 14, 2]),
        ("deepseek-v3", 8, 5, 0, [5, *[8] * 7]),
        ("kimi-k2", 8, 7, 6, [7, *[8] * 6, 6]),
        ("qwen3-235b-a22b", 8, 11, 11, [11, *[12] * 6, 11]),
        ("qwen3-235b-a22b", 16, 5, 5, [5, *[6] * 14, 5]),
    ],
)
def test_layers_that_no_number_of_stages_divides_are_cut_unevenly(
    model: str, pipeline: int, first: int, last: int, layers: list[int]
) -> None:
    hf = published(model)
    parallel = ParallelConfig(pipeline=pipeline, first_stage_layers=first, last_stage_layers=last)
    check_cut(hf, parallel)
    at = Coordinates(pp_size=pipeline, first_stage_layers=first, last_stage_layers=last)
    assert at.stage_layers(hf["num_hidden_layers"]) == layers
    # the planner of weight transfers takes the same sizes
    shape = ParallelShape(
        ranks=pipeline, pipeline=pipeline, first_stage_layers=first, last_stage_layers=last
    )
    assert {
        one.stage_layers(hf["num_hidden_layers"])[one.pp_rank] for one in shape.coordinates()
    } == set(layers)
    with pytest.raises(ModelError, match="num_hidden_layers is"):
        check_cut(hf, ParallelConfig(pipeline=pipeline))


@pytest.mark.parametrize(
    ("model", "pipeline", "virtual", "layers"),
    [
        # arXiv 2603.07685: Et|(tt|)*30mL, without the MTP head
        ("deepseek-v3", 8, 4, (1, *[2] * 30, 0)),
        ("deepseek-v3", 16, 1, (3, *[4] * 14, 2)),
        ("kimi-k2", 16, 2, (1, *[2] * 30, 0)),
        ("kimi-k2", 7, 1, (8, 9, 9, 9, 9, 9, 8)),
        # 32 virtual stages, which no number for the ends alone gives
        ("qwen3-235b-a22b", 8, 4, (2, *[3] * 30, 2)),
    ],
)
def test_run_planners_and_transfers_take_the_same_list(
    model: str, pipeline: int, virtual: int, layers: tuple[int, ...]
) -> None:
    hf = published(model)
    experts = 8
    parallel = ParallelConfig(
        pipeline=pipeline,
        virtual_pipeline=virtual,
        expert=experts,
        layers_per_stage=layers,
        tensor=2,
        sequence=True,
    )
    check_cut(hf, parallel)
    decoder = decoder_of(hf)
    ranks = pipeline * experts
    shape = ParallelShape(
        ranks, 2, pipeline, virtual, expert=experts, expert_tensor=1, layers_per_stage=layers
    )  # of the transfer
    held = {
        int(found.group(1))
        for at in {one.pp_rank: one for one in shape.coordinates()}.values()
        for chunk in at.virtual_stages()
        for local in decoder.local_tensors(chunk)
        for piece in local.pieces
        if (found := re.match(r"model\.layers\.(\d+)\.", piece.source))
    }
    assert held == set(range(hf["num_hidden_layers"]))
    cut = cut_of(parallel, ranks)  # of the planner of memory and time
    training = Training(decoder, cut, DEVICES["H100"])
    counts = [sum(layers[stage::pipeline]) for stage in range(pipeline)]
    assert [sum(count for _, count in stage) for stage in training.layers] == counts
    with pytest.raises(ModelError, match="num_hidden_layers is"):
        check_cut(hf, replace(parallel, layers_per_stage=()))
    with pytest.raises(ModelError, match="adds up to"):
        check_cut(hf, replace(parallel, layers_per_stage=(layers[0] + 1, *layers[1:])))


@pytest.mark.parametrize(
    ("family", "sizes", "parallel", "said"),
    [
        ("mixtral", {"intermediate_size": 33}, {"tensor": 2}, "(?<!moe_)intermediate_size is 33"),
        ("mixtral", {"num_local_experts": 3}, {"expert": 2}, "num_local_experts is 3"),
        ("glm4_moe", {"n_routed_experts": 9}, {"expert": 2}, "n_routed_experts is 9"),
        ("deepseek_v3", {"intermediate_size": 33}, {"tensor": 2}, "intermediate_size is 33"),
        (
            "deepseek_v3",
            {"moe_intermediate_size": 33},
            {"tensor": 2, "expert": 2},
            "shared experts' .* is 33",
        ),
        ("qwen3_next", {"linear_num_key_heads": 4}, {"tensor": 8}, "linear_num_key_heads is 4"),
        (  # attention is neither in the first layer nor in the last
            "qwen3_5_text",
            {
                "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
            },
            {"tensor": 4},
            "num_attention_heads is 6",
        ),
        (
            "qwen3_next",
            {"linear_num_key_heads": 4},
            {"tensor": 4, "context": 2},
            "context=2 exceeds the 1 key heads",
        ),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            {"tensor": 4},
            "num_key_value_heads 3",
        ),
        (
            "llama",
            {"num_hidden_layers": 5},
            {"pipeline": 2},
            "num_hidden_layers is 5, .*pipeline 2",
        ),
    ],
)
def test_the_layouts_that_failed_after_the_start(
    family: str, sizes: dict[str, Any], parallel: dict[str, int], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        check_cut({**FAMILIES[family], **sizes}, ParallelConfig(**parallel))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ("model.hf_config.num_hidden_layers=3",),
            ("num_hidden_layers is 3", "actor.parallel.pipeline 2"),
        ),
        (
            ("actor.parallel.virtual_pipeline=2",),
            ("layers of pipeline stage 0 is 1", "virtual_pipeline 2"),
        ),
        (
            ("model.hf_config.moe_intermediate_size=33", "actor.parallel.expert_tensor=2"),
            ("intermediate_size is 33",),
        ),
        (("actor.recompute_modules=[moe]",), ("requires actor.recompute=selective, got none",)),
        (
            ("actor.recompute=selective", "actor.recompute_modules=[mla_up_proj]"),
            ("have no multi-head latent",),
        ),
        (("model.hf_config.num_experts=3",), ("num_experts is 3", "actor.parallel.expert 2")),
        (
            ("model=tiny-dense", "model.hf_config.intermediate_size=33"),
            ("intermediate_size is 33", "tensor 2"),
        ),
        (
            (
                "algorithm=ppo",
                "critic.placement=own",
                "critic.procs=3",
                "critic.parallel.pipeline=3",
            ),
            ("num_hidden_layers is 2", "critic.parallel.pipeline 3"),
        ),
    ],
)
def test_a_run_is_refused_with_key_and_value(
    words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    lines = list(problems(load_config("e2e", words)))
    assert any(all(part in line for part in parts) for line in lines), lines


def test_a_run_that_fits_passes_both_checks() -> None:
    config = load_config("e2e", [])
    assert config_problems(config) == list(problems(config)) == []
    assert isinstance(family_of({"vocab_size": 1, **derived.hf_config(config.model)}), Decoder)


def test_each_folder_of_weights_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The critic begins at the policy's; a reward model has its own."""
    found = list[tuple[str, int]]()
    for name in ("policy", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(FAMILIES["qwen3"]))
    monkeypatch.setattr(
        "hybridflow.models.check.check_weights",
        lambda folder, tensors: found.append((folder.name, len(tensors))),
    )
    words = (f"model.path={tmp_path}/policy", f"reward_model.path={tmp_path}/judge")
    more = ("model=folder", "algorithm=ppo", "reward_model=tiny")
    check(load_config("e2e", (*more, *words)))
    assert found == [("policy", len(family_of(FAMILIES["qwen3"]).tensors())), ("judge", 0)]


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen2_moe", "mixtral"])
def test_fsdp_takes_mixtures_of_experts(model: str) -> None:
    check_fsdp(family_of({"vocab_size": 64, **FAMILIES[model]}))


@pytest.mark.parametrize("model", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_fsdp_refuses_expert_biases(model: str) -> None:
    with pytest.raises(ModelError, match=f"model_type '{model}' has expert biases"):
        check_fsdp(family_of({"vocab_size": 64, **FAMILIES[model]}))


def test_fsdp_refuses_experts_stored_as_one_tensor() -> None:
    hf = {"vocab_size": 64, **FAMILIES["gpt_oss"], "sliding_window": None, "layer_types": None}
    with pytest.raises(ModelError, match="has experts with biases"):
        check_fsdp(family_of(hf))


def test_fsdp_refuses_delta_nets() -> None:
    """transformers' layer would carry its state from one packed row to the next."""
    with pytest.raises(ModelError, match="'qwen3_5_text' has gated delta nets"):
        check_fsdp(family_of(FAMILIES["qwen3_5_text"]))
    attention = {**FAMILIES["qwen3_5_text"], "layer_types": ["full_attention"] * 4}
    check_fsdp(family_of(attention))
