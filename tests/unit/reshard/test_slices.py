"""Slice plans of every family through every layout: proven, carried out by value, and wrong maps
caught."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ModelError, WeightSyncError
from hybridflow.models import blocks, delta_net, mla
from hybridflow.models.blocks import MlpNames
from hybridflow.models.layout import LocalTensor, ParallelShape
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import Catalog, megatron_layout
from hybridflow.reshard.links import link_loads, staging_peak
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.proof import compare_buffers, prove
from hybridflow.reshard.slices import SlicePlan
from hybridflow.sync.messages import MAX_PARTS, Message, Messages, item_bytes
from tests.models import FAMILIES
from tests.unit.reshard import reshard_cases as cases

PAIRS = [(model, layout) for model in FAMILIES for layout in cases.LAYOUTS]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_every_family_reaches_every_engine(model: str, layout: str) -> None:
    decoder = cases.decoder_of(model)
    shape, engines = cases.LAYOUTS[layout]
    ranks = shape.coordinates()
    weights = cases.random_weights(decoder)
    trainers = cases.trainer_buffers(decoder, ranks, weights)
    for name, value in cases.hf_from_megatron(decoder.hf, ranks, trainers).items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)
    plan = cases.plan_of(decoder, shape, engines)
    proof = prove(plan)
    assert proof.unused == ()
    expected = cases.engine_buffers(plan.target, plan.catalog, weights)
    actual = cases.engine_buffers(plan.target, plan.catalog, None)
    sent = cases.execute(plan, trainers, actual)
    for rank, (want, got) in enumerate(zip(expected, actual, strict=True)):
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"rank {rank} {name}")
    # nothing travels twice: exactly the engines' elements without their padding
    padding = sum(
        int((rank.size[rank.tensor < 0]).prod(axis=1).sum())
        for rank in (plan.target.classes[c] for c in plan.target.rank_class)
    )
    assert sent == sum(buffer.nbytes for rank in expected for buffer in rank.values()) - 4 * padding
    assert sent == link_loads(plan).total
    assert max(staging_peak(plan)) <= 1 << 20


def test_oracle_covers_all_matrices() -> None:
    decoder = cases.decoder_of("glm4_moe")
    ranks = ParallelShape(4, tensor=2, pipeline=2, expert=2).coordinates()
    held = cases.trainer_buffers(decoder, ranks, cases.random_weights(decoder))
    read = cases.hf_from_megatron(decoder.hf, ranks, held)
    assert sorted(read) == sorted(
        n
        for n in decoder.tensors()
        if "norm" not in n and ".gate.e_" not in n and not n.endswith(".gate.weight")
    )


def test_plan_is_json_with_its_hash() -> None:
    plan = cases.plan_of(cases.decoder_of("deepseek_v3"), *cases.LAYOUTS["DP2.EP2 to TP2 and TP1"])
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["hash"] == plan.digest() and data["sends"]["source"] == plan.sends.source.tolist()
    assert data["catalog"]["names"] == list(plan.catalog.names)


def test_plan_is_the_same_each_time_and_differs_with_its_input() -> None:
    decoder = cases.decoder_of("qwen3_moe")
    shape, engines = cases.LAYOUTS["TP2.PP2.EP2 to 2 x TP1"]
    digests = {cases.plan_of(decoder, shape, engines).digest() for _ in range(2)}
    assert len(digests) == 1
    assert cases.plan_of(decoder, shape, engines, staging_bytes=1 << 19).digest() not in digests
    assert cases.plan_of(cases.decoder_of("llama"), shape, engines).digest() not in digests


def test_replicas_share_the_work() -> None:
    plan = cases.plan_of(
        cases.decoder_of("llama"), ParallelShape(8, tensor=2), (EngineShape(tensor=2, count=4),)
    )
    loads = link_loads(plan)
    assert loads.hottest <= 1.05 * loads.bound
    assert loads.egress.max() <= 1.1 * loads.egress.mean()
    assert loads.packed.sum() < loads.egress.sum()  # one packing serves several receivers


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(sorted(FAMILIES)),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    expert=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2]),
    engine=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]),
    count=st.sampled_from([1, 3]),
    staging=st.sampled_from([1 << 17, 1 << 18, 1 << 22]),
    part=st.sampled_from([0, 1, 1000, 1 << 12, 1 << 15]),
)
def test_any_plan_is_proven_and_executes(
    model: str,
    tensor: int,
    pipeline: int,
    expert: int,
    data: int,
    engine: tuple[int, int],
    count: int,
    staging: int,
    part: int,
) -> None:
    if "linear_num_key_heads" in FAMILIES[model]:
        staging = max(staging, 1 << 18)  # half of it must hold the fused projection of a delta net
    decoder = cases.decoder_of(model)
    shape = ParallelShape(
        max(tensor, expert) * pipeline * data, tensor=tensor, pipeline=pipeline, expert=expert
    )
    plan = cases.plan_of(
        decoder,
        shape,
        (EngineShape(tensor=engine[0], expert=engine[1], count=count), EngineShape()),
        staging,
    )
    prove(plan)
    assert max(staging_peak(plan)) <= staging
    weights = cases.random_weights(decoder)
    actual = cases.engine_buffers(plan.target, plan.catalog, None)
    cases.execute(plan, cases.trainer_buffers(decoder, shape.coordinates(), weights), actual, part)
    for want, got in zip(
        cases.engine_buffers(plan.target, plan.catalog, weights), actual, strict=True
    ):
        assert all(np.array_equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("part", [1000, 1 << 13])
def test_parts_are_small_and_large_slices_travel_alone(part: int) -> None:
    decoder = cases.decoder_of("glm4_moe")
    plan = cases.plan_of(
        decoder,
        ParallelShape(4, tensor=2, pipeline=2, expert=2),
        (EngineShape(tensor=2), EngineShape()),
        1 << 18,
    )
    limit = max(part, 16 * plan.bucket_bytes // MAX_PARTS)
    whole = Messages(plan)
    cut = Messages(plan, part)
    for rank in range(plan.target.num_ranks):
        messages = cut.incoming(rank)
        assert sum(m.nbytes for m in messages) == sum(m.nbytes for m in whole.incoming(rank))
        assert max(m.nbytes for m in messages) <= limit and len(messages) > 2 * len(
            whole.incoming(rank)
        )
        assert len({(m.peer, m.tag) for m in messages}) == len(messages)
        for message in messages:
            assert len(message.items) == 1 or max(map(item_bytes, message.items)) < limit // 4
        joined: dict[tuple[int, int], list[Message]] = {}
        for message in messages:
            joined.setdefault((message.bucket, message.peer), []).append(message)
        for parts in joined.values():
            assert [m.part for m in parts] == list(range(len(parts)))
            assert all(
                a.nbytes + item_bytes(b.items[0]) > limit or len(b.items) == 1 or len(a.items) == 1
                for a, b in pairwise(parts)
            )


def test_replicas_that_are_cut_in_other_ways() -> None:
    """Two trainers of unlike tensor parallelism at once: overlapping regions that are not equal."""
    decoder = cases.decoder_of("glm4_moe")
    catalog = Catalog.of(decoder.tensors())
    weights = cases.random_weights(decoder)
    ranks = [
        *ParallelShape(2, tensor=2, expert=2).coordinates(),
        *ParallelShape(4, tensor=4, expert=4).coordinates(),
    ]
    plan = make_plan(
        catalog,
        megatron_layout(decoder, ranks, "float32"),
        engine_layout(decoder, (EngineShape(tensor=2),), "float32"),
        1 << 20,
    )
    prove(plan)
    actual = cases.engine_buffers(plan.target, catalog, None)
    cases.execute(plan, cases.trainer_buffers(decoder, ranks, weights), actual)
    for want, got in zip(cases.engine_buffers(plan.target, catalog, weights), actual, strict=True):
        assert all(np.array_equal(want[name], got[name]) for name in want)


# ---- wrong maps
# --------------------------------------------------------------------------------------------------


def caught(model: str) -> str:
    """Who notices that something is wrong with the map: "proof", "values", or nobody."""
    decoder = cases.decoder_of(model)
    shape = ParallelShape(4, tensor=2, pipeline=2, expert=2)
    try:
        prove(cases.plan_of(decoder, shape, (EngineShape(tensor=2),)))
    except (WeightSyncError, ModelError):
        return "proof"
    ranks = shape.coordinates()
    weights = cases.random_weights(decoder)
    read = cases.hf_from_megatron(decoder.hf, ranks, cases.trainer_buffers(decoder, ranks, weights))
    return (
        "nobody"
        if all(np.array_equal(value, weights[name]) for name, value in read.items())
        else "values"
    )


@pytest.mark.parametrize("model", FAMILIES)
def test_right_maps_raise_no_alarm(model: str) -> None:
    assert caught(model) == "nobody"


# gpt-oss keeps experts as the checkpoint does; they are compared by log-probs (tests/dist)
GATED = [model for model in FAMILIES if model != "gpt_oss"]


@pytest.mark.parametrize("model", GATED)
def test_swapped_gate_and_up_are_caught(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks.MlpNames.rows

    def swapped(
        self: MlpNames, source: str, ffn: int, first: int, rows: int
    ) -> list[tuple[str, int, int]]:
        return right(self, source, ffn, first, rows)[::-1]

    monkeypatch.setattr(blocks.MlpNames, "rows", swapped)
    assert caught(model) == "values"


@pytest.mark.parametrize("model", [m for m in GATED if any("expert" in key for key in FAMILIES[m])])
def test_one_expert_off_is_caught(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks.gated_local

    def off_by_one(fc1: str, fc2: str, source: str, *rest: object) -> list[LocalTensor]:
        if ".experts." in source:
            head, number = source.removesuffix(".").rsplit(".", 1)
            source = f"{head}.{(int(number) + 1) % 8}."
        return right(fc1, fc2, source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(blocks, "gated_local", off_by_one)
    assert caught(model) == "values"


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("lost", ["bias", "norm", "linear_proj"])
def test_a_missing_tensor_is_caught(model: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def leaving_out(right: Callable[..., list[LocalTensor]]) -> Callable[..., list[LocalTensor]]:
        def local(*args: object) -> list[LocalTensor]:
            tensors = right(*args)
            found.extend(t for t in tensors if lost in t.name)
            return [t for t in tensors if lost not in t.name]

        return local

    for kind in (
        *(blocks.GroupedAttention, mla.LatentAttention, delta_net.DeltaNet),
        *(blocks.Experts, blocks.DenseMlp),
    ):
        monkeypatch.setattr(kind, "local", leaving_out(kind.local))
    assert caught(model) == ("proof" if found else "nobody")


@pytest.mark.parametrize("model", FAMILIES)
def test_swapped_key_and_value_are_caught(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks.GroupedAttention._interleaved

    def swapped(self: blocks.GroupedAttention, hf: str, kind: str) -> list[tuple[str, int, int]]:
        names = {
            f"{hf}k_proj.{kind}": f"{hf}v_proj.{kind}",
            f"{hf}v_proj.{kind}": f"{hf}k_proj.{kind}",
        }
        return [(names.get(name, name), first, rows) for name, first, rows in right(self, hf, kind)]

    monkeypatch.setattr(blocks.GroupedAttention, "_interleaved", swapped)
    latent = model in ("deepseek_v3", "moonlight", "glm4_moe_lite")
    assert caught(model) == ("nobody" if latent else "values")


# ---- wrong plans, wrong input
# --------------------------------------------------------------------------------------------------


def small_plan() -> SlicePlan:
    return cases.plan_of(cases.decoder_of("qwen2"), *cases.LAYOUTS["TP2.PP2 to TP2"])


@pytest.mark.parametrize(
    ("table", "column", "message"),
    [
        ("deliveries", "start", "missing|beyond|overlap|inside"),
        ("deliveries", "size", "missing|beyond|overlap"),
        ("deliveries", "piece", "missing|beyond|overlap|inside"),
        ("deliveries", "region", "not inside|does not hold"),
        ("sends", "source", "does not hold"),
        ("sends", "last", "is not sent exactly once"),
        ("deliveries", "bucket", "split across buckets|more than"),
    ],
)
def test_a_changed_plan_is_not_proven(table: str, column: str, message: str) -> None:
    plan = small_plan()
    tables = getattr(plan, table)
    fused = np.flatnonzero(
        [
            ("q_proj.weight" in plan.catalog.names[t])
            for t in plan.regions.tensor[plan.deliveries.region]
        ]
    )
    row = (
        int(fused[0])
        if table == "deliveries"
        else int(np.flatnonzero(plan.sends.delivery == fused[0])[0])
    )
    values = getattr(tables, column).copy()
    values[row] = values[row] + 1 if column != "source" else (values[row] + 2) % 4
    changed = dataclasses.replace(plan, **{table: dataclasses.replace(tables, **{column: values})})
    with pytest.raises(WeightSyncError, match=message):
        prove(changed)


def test_a_buffer_without_pieces_is_named() -> None:
    plan = small_plan()
    rank = plan.target.classes[0]
    keep = rank.buffer != rank.names.index("model.layers.1.self_attn.qkv_proj.bias")
    columns = {
        name: getattr(rank, name)[keep] for name in ("tensor", "start", "size", "buffer", "local")
    }
    damaged = dataclasses.replace(rank, **columns)
    target = dataclasses.replace(plan.target, classes=(damaged, *plan.target.classes[1:]))
    with pytest.raises(
        WeightSyncError,
        match=(
            r"engine rank 0, model\.layers\.1\.self_attn\.qkv_proj\.bias: 64 elements are not "
            r"written"
        ),
    ):
        prove(dataclasses.replace(plan, target=target))


def test_unused_tensors_must_be_allowed() -> None:
    decoder = cases.decoder_of("deepseek_v3", mtp=True)
    plan = cases.plan_of(decoder, ParallelShape(2, pipeline=2), (EngineShape(),))
    with pytest.raises(
        WeightSyncError, match=r"at least one engine does not use model\.layers\.4\."
    ):
        prove(plan)
    heads = [name for name in decoder.tensors() if name.startswith("model.layers.4.")]
    assert set(prove(plan, allow_unused=heads).unused) == set(heads)


def test_extra_and_missing_buffers_are_named() -> None:
    with pytest.raises(
        WeightSyncError,
        match=(
            r"engine 1 rank 0: .*extra \['c'\], missing \['a'\], with a different shape \[\('b', \(2,\), "
            r"\(3,\)\)\]"
        ),
    ):
        compare_buffers({"a": (1,), "b": (2,)}, {"b": (3,), "c": (4,)}, "engine 1 rank 0")
    compare_buffers({"a": (1, 2)}, {"a": (1, 2)}, "")


def test_a_source_that_lacks_something_is_refused() -> None:
    decoder = cases.decoder_of("llama")
    catalog = Catalog.of(decoder.tensors())
    half = megatron_layout(decoder, ParallelShape(2, pipeline=2).coordinates()[:1], "float32")
    with pytest.raises(
        WeightSyncError, match=r"no trainer rank holds all of lm_head\.weight, .* pipeline stage"
    ):
        make_plan(catalog, half, engine_layout(decoder, (EngineShape(),), "float32"), 1 << 20)


def test_a_fused_tensor_larger_than_a_bucket_is_refused_with_the_size_needed() -> None:
    with pytest.raises(
        WeightSyncError,
        match=r"qkv_proj\.weight \(65536 bytes\) .* set the staging bytes to at least 131072",
    ):
        cases.plan_of(
            cases.decoder_of("llama"), ParallelShape(1), (EngineShape(),), staging_bytes=90_000
        )
    cases.plan_of(
        cases.decoder_of("llama"), ParallelShape(1), (EngineShape(),), staging_bytes=131_072
    )


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    decoder = cases.decoder_of("qwen3_moe")
    with pytest.raises(WeightSyncError, match="num_experts is 8"):
        engine_layout(decoder, (EngineShape(tensor=16, expert=16, data_attention=16),), "float32")
    with pytest.raises(ModelError, match="not a multiple of 6"):
        ParallelShape(4, tensor=2, pipeline=3).coordinates()
    catalog = Catalog.of(decoder.tensors())
    source = megatron_layout(decoder, ParallelShape(1).coordinates(), "bfloat16")
    with pytest.raises(WeightSyncError, match="float8_e4m3fn"):
        make_plan(
            catalog, source, engine_layout(decoder, (EngineShape(),), "float8_e4m3fn"), 1 << 20
        )


def test_casts_are_recorded_and_counted_in_the_engine_dtype() -> None:
    decoder = cases.decoder_of("deepseek_v3")
    catalog = Catalog.of(decoder.tensors())
    source = megatron_layout(decoder, ParallelShape(1).coordinates(), "float32")
    plan = make_plan(catalog, source, engine_layout(decoder, (EngineShape(),), "bfloat16"), 1 << 20)
    assert plan.conversions == (("float32", "bfloat16"),)
    elements = int(catalog.shapes.prod(axis=1).sum())
    biases = 3 * 8  # the expert biases of three sparse layers stay fp32
    assert link_loads(plan).total == 2 * (elements - biases) + 4 * biases
