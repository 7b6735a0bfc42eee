"""Block-wise fp8 made by the senders: what every engine rank gets is its slice of the whole
tensor's fp8 form and scales, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.cli.main import main
from hybridflow.errors import ModelError, WeightSyncError
from hybridflow.models.fp8 import FP8, BlockQuantisation
from hybridflow.models.layout import LocalTensor, ParallelShape, Piece
from hybridflow.models.published import published
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import Catalog, Layout, RankLayout, megatron_layout
from hybridflow.reshard.links import link_loads, staging_peak
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.proof import prove
from hybridflow.reshard.slices import SlicePlan
from hybridflow_kernels import fp8_cast
from tests.models import FAMILIES
from tests.unit.reshard import fp8_cases as fp8
from tests.unit.reshard import reshard_cases as cases

pytestmark = pytest.mark.slow  # hundreds of layouts of whole models

ONE = np.zeros(1, dtype=np.int64)
NAME = "model.layers.0.mlp.down_proj.weight"
# each family and each layout at least once; blocks that are no squares too
PAIRS = [
    (model, layout, block)
    for (model, layout), block in zip(
        [
            (m, list(cases.LAYOUTS)[(i + j) % len(cases.LAYOUTS)])
            for i, m in enumerate(FAMILIES)
            for j in (0, 3)
        ],
        [(4, 4), (4, 2), (2, 4)] * 8,
        strict=False,
    )
]


def plan_in_fp8(
    model: str,
    shape: ParallelShape,
    engines: tuple[EngineShape, ...],
    block: tuple[int, int],
    staging: int = 1 << 20,
    trainer: str = "float32",
) -> tuple[SlicePlan, BlockQuantisation]:
    decoder = cases.decoder_of(model)
    quantisation = BlockQuantisation(block)
    catalog = Catalog.of(decoder.tensors(), quantisation)
    source = megatron_layout(decoder, shape.coordinates(), trainer, catalog)
    return make_plan(
        catalog, source, engine_layout(decoder, engines, trainer, catalog, quantisation), staging
    ), quantisation


def check(
    model: str,
    shape: ParallelShape,
    plan: SlicePlan,
    quantisation: BlockQuantisation,
    trainer: str = "float32",
    part: int = 0,
) -> None:
    """Prove, carry out, compare; count the bytes."""
    assert prove(plan).unused == ()
    decoder = cases.decoder_of(model)
    dtype = getattr(torch, trainer)
    weights = {
        name: torch.from_numpy(value).to(dtype).float().numpy()
        for name, value in cases.random_weights(decoder).items()
    }
    held = cases.trainer_buffers(decoder, shape.coordinates(), weights)
    trainers = [
        {name: torch.from_numpy(value).to(dtype) for name, value in mine.items()} for mine in held
    ]
    live = fp8.engine_buffers(plan.target, plan.catalog, None)
    sent = fp8.stream(plan, trainers, live, staged=True, part_bytes=part)
    want = fp8.engine_buffers(plan.target, plan.catalog, fp8.forms_of(weights, quantisation))
    fp8.assert_equal(want, live)
    padding = 0
    for number in plan.target.rank_class.tolist():
        rank = plan.target.classes[number]
        width = np.array([getattr(torch, dtype).itemsize for dtype in rank.dtypes])
        padding += int((rank.size.prod(axis=1) * width[rank.buffer])[rank.tensor < 0].sum())
    assert (
        sent
        == link_loads(plan).total
        == sum(b.nbytes for mine in want for b in mine.values()) - padding
    )


@pytest.mark.parametrize(("model", "layout", "block"), PAIRS)
def test_every_family_reaches_engines_in_fp8(
    model: str, layout: str, block: tuple[int, int]
) -> None:
    shape, engines = cases.LAYOUTS[layout]
    plan, quantisation = plan_in_fp8(model, shape, engines, block)
    kinds = {dtype for rank in plan.target.classes for dtype in rank.dtypes}
    assert FP8 in kinds and ("float32", FP8) in plan.conversions
    check(model, shape, plan, quantisation)


@settings(max_examples=12, deadline=None)
@given(
    model=st.sampled_from(["deepseek_v3", "qwen3_moe", "glm4_moe"]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    expert=st.sampled_from([1, 2, 4]),
    engine=st.sampled_from(
        [
            EngineShape(),
            EngineShape(2),
            EngineShape(4, expert=2),
            EngineShape(4, expert=4, data_attention=2, dense=1),
        ]
    ),
    trainer=st.sampled_from(["float32", "bfloat16"]),
    staging=st.sampled_from([1 << 17, 1 << 22]),
    part=st.sampled_from([0, 1 << 10, 1 << 14]),
)
def test_any_layouts(
    model: str,
    tensor: int,
    pipeline: int,
    expert: int,
    engine: EngineShape,
    trainer: str,
    staging: int,
    part: int,
) -> None:
    shape = ParallelShape(
        max(tensor, expert) * pipeline, tensor=tensor, pipeline=pipeline, expert=expert
    )
    plan, quantisation = plan_in_fp8(
        model, shape, (engine, EngineShape()), (4, 4), staging, trainer
    )
    assert max(staging_peak(plan)) <= staging
    check(model, shape, plan, quantisation, trainer, part)


@pytest.mark.parametrize(
    ("model", "block", "tensor"), [("moonlight", (16, 16), 2), ("llama", (16, 48), 1)]
)
def test_last_blocks_may_be_smaller(model: str, block: tuple[int, int], tensor: int) -> None:
    shape = ParallelShape(2, tensor=tensor, pipeline=2 // tensor)
    plan, quantisation = plan_in_fp8(model, shape, (EngineShape(tensor), EngineShape()), block)
    blocks = plan.catalog.scales
    assert (plan.catalog.shapes[blocks[:, 0], 1:] % blocks[:, 2:]).any(), (
        "no tensor has a smaller block"
    )
    check(model, shape, plan, quantisation)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    block=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    cuts=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    split=st.integers(0, 20),
    staging=st.sampled_from([300, 1200, 1 << 20]),
)
def test_engines_and_buckets_may_cut_blocks(
    rows: int, columns: int, block: tuple[int, int], cuts: tuple[int, int], split: int, staging: int
) -> None:
    """A part of the fp8 form is that part of the whole form wherever it is cut: four engine ranks
    cut anywhere, buckets of any size."""
    rng = np.random.default_rng(rows * 71 + columns)
    weights = {NAME: rng.standard_normal((rows, columns)).astype(np.float32)}
    quantisation = BlockQuantisation(block)
    catalog = Catalog.of({NAME: (rows, columns)}, quantisation)
    at = min(split * block[0], rows)
    holders = [(0, at), (at, rows)] if 0 < at < rows else [(0, rows)]
    source = layout_of(
        [
            LocalTensor("w", (b - a, columns), (Piece(NAME, (a, 0), (0, 0), (b - a, columns)),))
            for a, b in holders
        ],
        catalog,
    )
    scale = quantisation.scale_shape((rows, columns))
    engines = []
    for a, b in spans(cuts[0], rows):
        for c, d in spans(cuts[1], columns):
            piece = Piece(NAME, (a, c), (0, 0), (b - a, d - c))
            scales = Piece(f"{NAME}_scale_inv", (0, 0), (0, 0), scale)
            engines.append(
                [
                    LocalTensor("w", piece.shape, (piece,), FP8),
                    LocalTensor("s", scale, (scales,), "float32"),
                ]
            )
    index = catalog.index()
    classes = tuple(RankLayout.of(mine, index, "float32") for mine in engines)
    target = Layout(classes, np.arange(len(engines)), np.zeros(len(engines), dtype=np.int64))
    plan = make_plan(
        catalog, source, target, max(staging, 8 * columns)
    )  # a bucket, half of it, holds one fp32 row at least
    prove(plan)
    trainers = [{"w": torch.from_numpy(weights[NAME][a:b])} for a, b in holders]
    live = fp8.engine_buffers(target, catalog, None)
    fp8.stream(plan, trainers, live, staged=False)
    fp8.assert_equal(fp8.engine_buffers(target, catalog, fp8.forms_of(weights, quantisation)), live)


def spans(cut: int, length: int) -> list[tuple[int, int]]:
    return [(0, cut), (cut, length)] if 0 < cut < length else [(0, length)]


def layout_of(ranks: list[LocalTensor], catalog: Catalog) -> Layout:
    classes = tuple(RankLayout.of([tensor], catalog.index(), "float32") for tensor in ranks)
    return Layout(classes, np.arange(len(ranks)), np.zeros(len(ranks), dtype=np.int64))


def whole_tensor_plan(rows: int, columns: int, block: int, staging: int) -> SlicePlan:
    catalog = Catalog.of({NAME: (rows, columns)}, BlockQuantisation((block, block)))
    both = [LocalTensor("w", (rows, columns), (Piece(NAME, (0, 0), (0, 0), (rows, columns)),), FP8)]
    scale = tuple(catalog.shapes[1, 1:].tolist())
    both.append(
        LocalTensor("s", scale, (Piece(catalog.names[1], (0, 0), (0, 0), scale),), "float32")
    )
    target = Layout((RankLayout.of(both, catalog.index(), "float32"),), ONE, ONE)
    return make_plan(
        catalog, layout_of([dataclasses.replace(both[0], dtype=None)], catalog), target, staging
    )


def test_buckets_end_between_blocks_where_they_can() -> None:
    plan = whole_tensor_plan(512, 64, 128, 2 * 64 * 200)
    starts = plan.deliveries.start[plan.deliveries.nbytes > 64, 1]
    assert sorted(starts.tolist()) == [0, 128, 256, 384]
    # less than a block: six of 100 rows, the scales
    assert len(whole_tensor_plan(512, 64, 128, 2 * 64 * 100).deliveries.start) == 7


# ---- values
# --------------------------------------------------------------------------------------------------


def values(rows: int, columns: int, scale: float) -> torch.Tensor:
    return (
        torch.from_numpy(
            np.random.default_rng(3).standard_normal((1, rows, columns)).astype(np.float32)
        )
        * scale
    )


def test_what_is_read_back_is_near_the_weights() -> None:
    weights = values(300, 200, 0.02)
    block = (128, 128)
    weights[:, :128, :128] = 0
    weights[:, 130, 5] = 1e-40  # beside larger ones
    out = torch.empty(weights.shape, dtype=torch.float8_e4m3fn)
    scales = fp8_cast.block_scales(weights, block)
    fp8_cast.write_weights(weights, block, 0, 0, out)
    spread = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :300, :200]
    error = (out.float() * spread - weights).abs()
    assert (error <= 448 * spread * 2**-4).all()
    assert error.max() > 0
    assert scales[0, 0, 0] == 1 and (out[:, :128, :128].float() == 0).all()
    assert out.float().abs().amax() == 448


@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e-30, 1e30])
def test_tiny_and_huge_weights_stay_finite(scale: float) -> None:
    weights = values(16, 16, scale)
    out = torch.empty(weights.shape, dtype=torch.float8_e4m3fn)
    fp8_cast.write_weights(weights, (8, 8), 0, 0, out)
    assert out.float().isfinite().all() and fp8_cast.block_scales(weights, (8, 8)).isfinite().all()


def test_a_weight_that_is_not_finite_stays_visible() -> None:
    weights = values(8, 8, 1.0)
    weights[0, 3, 3] = float("nan")
    assert fp8_cast.block_scales(weights, (4, 8)).isnan().flatten().tolist() == [True, False]


def test_long_tensors_are_worked_on_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = values(70, 33, 1.0)
    want, scales = fp8.quantise(weights[0].numpy(), (8, 16))
    monkeypatch.setattr(fp8_cast, "_STRIP", 600)
    out = torch.empty((1, 50, 20), dtype=torch.float8_e4m3fn)
    found = torch.empty((1, 9, 3))
    fp8_cast.write_weights(weights, (8, 16), 7, 9, out)
    fp8_cast.write_scales(weights, (8, 16), found)
    assert torch.equal(out[0].float(), want[7:57, 9:29].float()) and torch.equal(found[0], scales)


def test_same_as_transformers() -> None:
    """transformers multiplies by 448 / amax, we divide by amax / 448: a value may round to its
    neighbour, rarely."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    weights = values(384, 256, 0.02)
    weights[:, :128, 128:] = 0
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    found = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert(
        {"x.weight": weights[0]}
    )
    out = torch.empty(weights.shape, dtype=torch.float8_e4m3fn)
    fp8_cast.write_weights(weights, (128, 128), 0, 0, out)
    assert set(found) == {"x.weight", "x.weight_scale_inv"}
    torch.testing.assert_close(
        fp8_cast.block_scales(weights, (128, 128))[0],
        found["x.weight_scale_inv"],
        rtol=3e-7,
        atol=0,
    )
    codes = [form.view(torch.uint8).int() for form in (out[0], found["x.weight"])]
    apart = (codes[0] - codes[1]).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-4


# ---- which tensors
# --------------------------------------------------------------------------------------------------


def test_which_tensors_are_quantised() -> None:
    decoder = cases.decoder_of("deepseek_v3", mtp=True)
    whole = BlockQuantisation()
    plain = {name for name, shape in decoder.tensors().items() if not whole.covers(name, shape)}
    assert {n for n in plain if len(decoder.tensors()[n]) == 2} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.4.eh_proj.weight",
        *(f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3, 4)),
    }
    skipping = BlockQuantisation(skipped=("model.layers.0.self_attn", "o_proj"))
    assert not skipping.covers("model.layers.0.self_attn.kv_b_proj.weight", (4, 4))
    assert not skipping.covers("model.layers.1.self_attn.o_proj.weight", (4, 4))
    assert skipping.covers("model.layers.1.self_attn.kv_b_proj.weight", (4, 4))
    assert BlockQuantisation.of({"quantization_config": skipping.config()}) == skipping


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "awq"}, "quant_method='awq'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme='static'"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt='ue8m0' is not supported"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be .*\\[128\\]",
        ),
    ],
)
def test_other_quantisations_are_refused(said: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        BlockQuantisation.of({"quantization_config": said})


# ---- wrong input, wrong plans
# --------------------------------------------------------------------------------------------------


def test_a_trainer_that_cuts_blocks_is_refused() -> None:
    with pytest.raises(
        WeightSyncError,
        match=(
            r"trainer rank 0 holds \[0:48, 0:64\] of model\.layers\.0\.mlp\.gate_proj\.weight "
            r"\[96, 64\]"
        ),
    ):
        plan_in_fp8("moonlight", ParallelShape(2, tensor=2), (EngineShape(),), (32, 8))
    with pytest.raises(
        WeightSyncError,
        match=(
            r"k_proj\.weight .* block of 16 x 16.* actor\.parallel\.tensor .*modules_to_not_convert"
        ),
    ):
        # keys of 8 rows a head: cut at any size
        plan_in_fp8("qwen2", ParallelShape(1), (EngineShape(),), (16, 16))


def test_an_engine_that_cuts_blocks_is_refused() -> None:
    with pytest.raises(
        WeightSyncError,
        match=(
            r"gate_up_proj\.weight holds \[0:48\] of model.* not aligned to fp8 blocks of 32; choose a "
            r"smaller tensor size"
        ),
    ):
        plan_in_fp8("llama", ParallelShape(1), (EngineShape(2),), (32, 32))


def test_an_engine_in_fp8_must_take_the_scales() -> None:
    plan, _ = plan_in_fp8("llama", ParallelShape(1), (EngineShape(),), (4, 4))
    rank = plan.target.classes[0]
    lost = rank.names.index("model.layers.2.mlp.down_proj.weight_scale_inv")
    keep = rank.buffer != lost
    without = [n for n in range(len(rank.names)) if n != lost]
    columns = {name: getattr(rank, name)[keep] for name in ("tensor", "start", "size", "local")}
    columns["buffer"] = rank.buffer[keep] - (rank.buffer[keep] > lost)
    names, dtypes = ([some[n] for n in without] for some in (rank.names, rank.dtypes))
    poorer = RankLayout(
        names=tuple(names), dtypes=tuple(dtypes), shapes=rank.shapes[without], **columns
    )
    decoder = cases.decoder_of("llama")
    source = megatron_layout(decoder, ParallelShape(1).coordinates(), "float32", plan.catalog)
    with pytest.raises(
        WeightSyncError,
        match=r"at least one engine does not use model\.layers\.2\.mlp\.down_proj\.weight_scale_inv",
    ):
        prove(make_plan(plan.catalog, source, Layout((poorer,), ONE, ONE), 1 << 20))


def test_engines_in_fp8_and_in_other_dtypes_at_once() -> None:
    decoder = cases.decoder_of("qwen3_moe")
    quantisation = BlockQuantisation((4, 4))
    shape = ParallelShape(2, tensor=2, expert=2)
    catalog = Catalog.of(decoder.tensors(), quantisation)
    source = megatron_layout(decoder, shape.coordinates(), "float32", catalog)
    [one] = engine_layout(decoder, (EngineShape(),), "bfloat16", catalog, quantisation).classes
    [other] = engine_layout(decoder, (EngineShape(),), "bfloat16", catalog).classes
    plan = make_plan(catalog, source, Layout((one, other), np.arange(2), np.arange(2)), 1 << 20)
    check("qwen3_moe", shape, plan, quantisation)


@pytest.mark.parametrize("what", ["region", "scale of another tensor", "scale elsewhere"])
def test_a_sender_without_the_blocks_is_found(what: str) -> None:
    plan, _ = plan_in_fp8("llama", ParallelShape(2, tensor=2), (EngineShape(),), (4, 4))
    if what == "region":
        scales = plan.catalog.scales.copy()
        scales[:, 3] = 24  # 4 x 24 blocks: a rank's columns of down_proj are 48, of o_proj 64
        changed = dataclasses.replace(
            plan, catalog=dataclasses.replace(plan.catalog, scales=scales)
        )
        message = "does not hold the weights|beyond the region"
    else:
        rank = plan.source.classes[0]
        last = np.flatnonzero(
            rank.tensor == plan.catalog.index()["model.layers.3.mlp.down_proj.weight_scale_inv"]
        )[0]
        columns = {"tensor": rank.tensor.copy(), "start": rank.start.copy()}
        if what == "scale elsewhere":
            columns["start"][last, 2] += 12
        else:
            columns["tensor"][last] = plan.catalog.index()[
                "model.layers.2.mlp.down_proj.weight_scale_inv"
            ]
        classes = (dataclasses.replace(rank, **columns), *plan.source.classes[1:])
        changed = dataclasses.replace(
            plan, source=dataclasses.replace(plan.source, classes=classes)
        )
        message = r"does not hold the weights for its part of .*down_proj\.weight_scale_inv"
    with pytest.raises(WeightSyncError, match=message):
        prove(changed)


def test_plan_has_its_blocks_in_json_and_in_its_hash() -> None:
    plan, _ = plan_in_fp8("qwen3_moe", ParallelShape(2, expert=2), (EngineShape(),), (4, 4))
    assert plan.to_dict()["catalog"]["scales"] == plan.catalog.scales.tolist()
    scales = plan.catalog.scales.copy()
    scales[0, 2] = 8
    changed = dataclasses.replace(plan, catalog=dataclasses.replace(plan.catalog, scales=scales))
    assert changed.digest() != plan.digest()


def test_the_dry_run_shows_about_half_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--model",
        "qwen3-30b-a3b",
        "--trainer",
        "ranks=16,tp=4,ep=8",
        "--engines",
        "2xtp=4,ep=4",
    ]
    figures = []
    for dtype in ("bfloat16", "fp8"):
        assert main(["reshard", "plan", *sizes, "--engine-dtype", dtype, "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    plain, half = figures
    assert half["parameters"] == plain["parameters"]
    # embeddings, norms, routers and the head stay bf16; a block of 16,384 has a scale of 4 bytes
    config = published("qwen3-30b-a3b")
    unquantised = 2 * config["vocab_size"] * config["hidden_size"] / plain["parameters"]
    assert half["wire_bytes"] / plain["wire_bytes"] == pytest.approx(
        (1 + unquantised + 4 / 16384) / 2, rel=2e-2
    )
    assert half["seconds"] < 0.6 * plain["seconds"]
    assert ["bfloat16", FP8] in half["conversions"]
