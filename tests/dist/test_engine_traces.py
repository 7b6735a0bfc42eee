"""The engines' real layouts against the hand-written ones and against plans: every family, SGLang's
own loaders on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.engines.layout_tracer import TracedLayout, TracedPiece
from hybridflow.errors import WeightSyncError
from hybridflow.models import family_of
from hybridflow.models.fp8 import FP8, BlockQuantisation
from hybridflow.models.layout import ParallelShape
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.generation import Engine
from hybridflow.reshard.engine_layouts import EngineRank, EngineShape, engine_layout
from hybridflow.reshard.layout import Catalog, Layout, RankLayout, megatron_layout
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.proof import prove
from tests.models import LONG_TESTS_FULL, SYNCED
from tests.unit.reshard import fp8_cases as fp8
from tests.unit.reshard import reshard_cases as cases

pytestmark = pytest.mark.slow
SPARSE = (
    *("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"),
    *("ernie4_5_moe", "glm4_moe_lite", "minimax_m2", "qwen2_moe"),
)
SHAPES = {
    "tp2": (EngineShape(tensor=2), tuple(SYNCED)),
    "tp2-ep2": (EngineShape(tensor=2, expert=2), SPARSE),
    "tp2-dpa2": (EngineShape(tensor=2, data_attention=2), ("qwen3_moe", "deepseek_v3")),
    "pp2": (EngineShape(pipeline=2), ("qwen2", "deepseek_v3", "gpt_oss")),
}
ONE_HEAD = {"num_nextn_predict_layers": 1}
DRAFTING = ("glm4_moe", "deepseek_v3")
FP8_BLOCK = (8, 8)
FP8_CASES = [("qwen3_moe", "tp2-ep2"), ("deepseek_v3", "tp2"), ("glm4_moe", "tp2")]
# what no other family has: nothing fused, norms and experts cut another way, transposed experts
IN_MAKE_TEST = (("seed_oss", "tp2"), ("minimax_m2", "tp2-ep2"), ("gpt_oss", "tp2"))
# their experts are cut in `make test`, and moonlight is what deepseek_v3 is
IN_FULL = (("mixtral", "tp2"), ("glm4_moe", "tp2"), ("moonlight", "tp2"))
CASES = [
    pytest.param(
        model,
        shape,
        marks=[pytest.mark.full]
        if (model in LONG_TESTS_FULL and (model, shape) not in IN_MAKE_TEST)
        or (model, shape) in IN_FULL
        else [],
    )
    for shape, (_, models) in SHAPES.items()
    for model in models
]
TRAINERS = (
    ParallelShape(4, tensor=2, pipeline=2, expert=2),
    ParallelShape(4, tensor=4),
    ParallelShape(2, pipeline=2, virtual_pipeline=2),
)


def checkpoint_config(model: str) -> dict[str, Any]:
    """The config as a published checkpoint has it."""
    published = (
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
        if model in ("deepseek_v3", "moonlight")
        else {}
    )
    architectures = [family_of(SYNCED[model]).architecture]
    return {**SYNCED[model], **published, "architectures": architectures, "dtype": "float32"}


@pytest.fixture(scope="module")
def traces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[TracedLayout]]:
    """What each rank's loader did, by (model, shape) of the selected tests."""
    folder = tmp_path_factory.mktemp("traces")
    asked = []
    in_fp8 = {
        "quantization_config": BlockQuantisation(FP8_BLOCK).config(),
        "dtype": "bfloat16",
    }
    selected = {
        (item.callspec.params.get("model"), item.callspec.params.get("name"))
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    everything: list[tuple[str, str, str, dict[str, Any]]] = [
        (model, name, name, {})
        for model, name in (case.values for case in CASES)
        if (model, name) in selected
    ]
    everything += [
        (model, name, f"{name}-fp8", in_fp8) for model, name in [*FP8_CASES, ("llama", "tp2")]
    ]
    everything += [(model, "tp2", "drafts", ONE_HEAD) for model in DRAFTING]
    for model, shape_name, name, more in everything:
        place = folder / f"{model}-{name}-model"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({**checkpoint_config(model), **more}))
        shape = SHAPES[shape_name][0]
        sizes = {
            key: getattr(shape, key) for key in ("tensor", "expert", "pipeline", "data_attention")
        }
        drafts = name == "drafts"
        asked.append({"name": f"{model}-{name}", "model": str(place), "draft": drafts, **sizes})
    (folder / "cases.json").write_text(json.dumps(asked))
    command = [sys.executable, "-m", "tests.dist.harness.engine_traces", str(folder)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    errors = {path.name: path.read_text()[-1500:] for path in folder.glob("*.error")}
    assert run.returncode == 0 and not errors, f"{errors}\n{run.stderr[-2000:]}"
    return {
        (model, name): [read_trace(folder / f"{model}-{name}-{rank}.json") for rank in range(2)]
        for model, _, name, _ in everything
    }


def read_trace(path: Path) -> TracedLayout:
    data = json.loads(path.read_text())
    buffers = {name: (tuple(shape), dtype) for name, (shape, dtype) in data["buffers"].items()}
    pieces = tuple(
        TracedPiece(**{k: tuple(v) if isinstance(v, list) else v for k, v in piece.items()})
        for piece in data["pieces"]
    )
    return TracedLayout(buffers, pieces, tuple(data["untouched"]))


def contents(
    rank: RankLayout, catalog: Catalog, weights: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The rank's buffers, filled."""
    layout = Layout((rank,), np.zeros(1, np.int64), np.zeros(1, np.int64))
    [buffers] = cases.engine_buffers(layout, catalog, weights)
    return buffers


@pytest.mark.parametrize(("model", "name"), CASES)
def test_engines_hold_what_the_hand_written_layout_says(
    model: str, name: str, traces: dict[tuple[str, str], list[TracedLayout]]
) -> None:
    decoder = cases.decoder_of(model)
    catalog = Catalog.of(decoder.tensors())
    weights = cases.random_weights(decoder)
    written = engine_layout(decoder, (SHAPES[name][0],), "float32")
    for traced, number in zip(traces[model, name], written.rank_class.tolist(), strict=True):
        real = traced.rank_layout(catalog)
        expected = contents(written.classes[number], catalog, weights)
        found = contents(real, catalog, weights)
        assert sorted(found) == sorted(expected)
        for buffer, values in expected.items():
            np.testing.assert_array_equal(found[buffer], values, err_msg=buffer)
        assert dict(zip(real.names, real.dtypes, strict=True)) == dict(
            zip(written.classes[number].names, written.classes[number].dtypes, strict=True)
        )


def check_plans(decoder: Any, catalog: Catalog, ranks: tuple[RankLayout, ...]) -> None:
    """Plans from every trainer to an engine with these ranks are proven, and fill its buffers with
    what belongs there."""
    weights = cases.random_weights(decoder)
    target = Layout(ranks, np.arange(2), np.zeros(2, np.int64))
    for shape in TRAINERS:
        plan = make_plan(
            catalog, megatron_layout(decoder, shape.coordinates(), "float32"), target, 1 << 20
        )
        assert prove(plan).unused == ()
        trainers = cases.trainer_buffers(decoder, shape.coordinates(), weights)
        engines = cases.engine_buffers(target, catalog, None)
        cases.execute(plan, trainers, engines)
        for want, got in zip(cases.engine_buffers(target, catalog, weights), engines, strict=True):
            assert all(np.array_equal(want[buffer], got[buffer]) for buffer in want)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_plans_to_the_real_layouts_are_proven_and_execute(
    model: str, name: str, traces: dict[tuple[str, str], list[TracedLayout]]
) -> None:
    decoder = cases.decoder_of(model)
    catalog = Catalog.of(decoder.tensors())
    ranks = tuple(traced.rank_layout(catalog) for traced in traces[model, name])
    check_plans(decoder, catalog, ranks)


@pytest.mark.parametrize(("model", "name"), FP8_CASES)
def test_engines_in_fp8_get_their_slices_of_the_quantised_tensors(
    model: str, name: str, traces: dict[tuple[str, str], list[TracedLayout]]
) -> None:
    """SGLang's own fp8 buffers, traced: those of the hand-written layout, and a plan to them brings
    what the whole tensors' form has."""
    decoder = cases.decoder_of(model)
    quantisation = BlockQuantisation(FP8_BLOCK)
    catalog = Catalog.of(decoder.tensors(), quantisation)
    weights = cases.random_weights(decoder)
    ranks = tuple(traced.rank_layout(catalog) for traced in traces[model, f"{name}-fp8"])
    target = Layout(ranks, np.arange(2), np.zeros(2, np.int64))
    want = fp8.engine_buffers(target, catalog, fp8.forms_of(weights, quantisation))
    written = engine_layout(decoder, (SHAPES[name][0],), "bfloat16", catalog, quantisation)
    assert [sorted(mine) for mine in want] == [
        sorted(written.classes[number].names) for number in written.rank_class.tolist()
    ]
    by_hand = fp8.engine_buffers(written, catalog, fp8.forms_of(weights, quantisation))
    quantised = {
        name
        for name, dtype in zip(ranks[0].names, ranks[0].dtypes, strict=True)
        if dtype == FP8 or name.endswith("_scale_inv")
    }
    fp8.assert_equal([{n: v for n, v in mine.items() if n in quantised} for mine in by_hand], want)
    shape = ParallelShape(4, tensor=2, pipeline=2, expert=2)
    plan = make_plan(
        catalog, megatron_layout(decoder, shape.coordinates(), "float32", catalog), target, 1 << 20
    )
    assert prove(plan).unused == ()
    held = cases.trainer_buffers(decoder, shape.coordinates(), weights)
    live = fp8.engine_buffers(target, catalog, None)
    fp8.stream(
        plan,
        [{n: torch.from_numpy(v) for n, v in mine.items()} for mine in held],
        live,
        staged=True,
    )
    fp8.assert_equal(want, live)


@pytest.mark.parametrize("model", DRAFTING)
def test_plans_reach_a_model_and_the_head_that_drafts_for_it(
    model: str, traces: dict[tuple[str, str], list[TracedLayout]]
) -> None:
    """Every tensor of the heads is used, every buffer that is not shared is filled, and each has
    what SGLang's own loaders put there."""
    decoder: Any = family_of({**SYNCED[model], **ONE_HEAD}, mtp=True)
    catalog = Catalog.of(decoder.tensors())
    ranks = tuple(traced.rank_layout(catalog) for traced in traces[model, "drafts"])
    for rank in ranks:
        assert any(name == "draft.model.eh_proj.weight" for name in rank.names)
        assert not any("embed_tokens" in name or "lm_head" in name for name in rank.names
                       if name.startswith("draft."))  # fmt: skip
    check_plans(decoder, catalog, ranks)


@pytest.mark.parametrize("model", DRAFTING)
def test_the_planner_counts_the_buffers_that_draft(
    model: str, traces: dict[tuple[str, str], list[TracedLayout]]
) -> None:
    """By the hand-written layout, whose buffers have the names and the contents of SGLang's."""
    hf = {**SYNCED[model], **ONE_HEAD}
    decoder: Any = family_of(hf, mtp=True)
    without: Any = family_of(hf)
    shape = SHAPES["tp2"][0]
    catalog = Catalog.of(decoder.tensors())
    weights = cases.random_weights(decoder)
    for rank, traced in enumerate(traces[model, "drafts"]):
        written = RankLayout.of(
            EngineRank(decoder, shape, rank).draft(), catalog.index(), "float32"
        )
        expected = contents(written, catalog, weights)
        real = contents(traced.rank_layout(catalog), catalog, weights)
        found = {name: values for name, values in real.items() if name.startswith("draft.")}
        assert sorted(found) == sorted(expected)
        for buffer, values in expected.items():
            np.testing.assert_array_equal(found[buffer], values, err_msg=buffer)
        planned = Engine(decoder, shape, DEVICES["H100"], item=4)
        assert planned.draft.total == sum(values.size for values in found.values())
        alone = Engine(without, shape, DEVICES["H100"], item=4)
        assert planned.weights - alone.weights == sum(values.nbytes for values in found.values())


def test_scales_that_an_engine_would_drop_are_found(
    traces: dict[tuple[str, str], list[TracedLayout]],
) -> None:
    """SGLang's Llama renames `weight_scale_inv` while it loads, finds no such parameter and goes on
    (sglang/srt/models/llama.py:724)."""
    decoder = cases.decoder_of("llama")
    catalog = Catalog.of(decoder.tensors(), BlockQuantisation(FP8_BLOCK))
    target = Layout(
        tuple(traced.rank_layout(catalog) for traced in traces["llama", "tp2-fp8"]),
        np.arange(2),
        np.zeros(2, np.int64),
    )
    plan = make_plan(
        catalog,
        megatron_layout(decoder, ParallelShape(1).coordinates(), "float32", catalog),
        target,
        1 << 20,
    )
    with pytest.raises(
        WeightSyncError, match=r"at least one engine does not use model\.layers\.0\.\S+_scale_inv"
    ):
        prove(plan)
