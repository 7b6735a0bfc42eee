"""How calls are spread over ranks and gathered, without any process: `plan_call` is executed here
by a loop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import DataProto
from hybridflow.dispatch import (
    PADDING_META,
    CallPlan,
    DataflowStep,
    Dispatch,
    Execute,
    Mesh,
    MeshError,
    MeshPosition,
    RankCall,
    check_dataflow,
    custom_dispatch,
    method_spec,
    plan_call,
    register,
)
from hybridflow.errors import SchemaError


def mesh(dp: int, model: int = 1, order: Callable[[int], tuple[int, int]] | None = None) -> Mesh:
    """`model` ranks in each of `dp` groups; the last one collects. Ranks of a group lie `dp` apart,
    as in Megatron with pipelining."""
    return Mesh(
        tuple(MeshPosition(rank % dp, dp, rank // dp == model - 1) for rank in range(dp * model))
    )


def batch(rows: int, **extra: np.ndarray) -> DataProto:
    return DataProto.from_columns(
        {"uid": np.arange(rows), "x": np.arange(rows) * 10, **extra}, {"t": 1}
    )


def execute(plan: CallPlan, function: Callable[..., Any]) -> Any:
    return plan.collect(
        {rank: function(rank, *call.args, **call.kwargs) for rank, call in plan.calls.items()}
    )


@register(Dispatch.DP, reads=("uid", "x"), writes=("uid", "y"))
def double(batch: DataProto, factor: int = 2) -> DataProto:
    return DataProto.from_columns({"uid": batch["uid"], "y": batch["x"] * factor})


@register(Dispatch.DP)
def anything(batch: DataProto) -> DataProto:
    return batch


@register(Dispatch.DP_METRIC)
def metric(batch: DataProto) -> Any:
    return batch


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 3))
def test_every_row_comes_back_once_in_order_whatever_the_mesh(
    rows: int, dp: int, model: int
) -> None:
    plan = plan_call(
        method_spec(double), dp * model, mesh(dp, model), (batch(rows),), {"factor": 3}
    )
    seen: dict[int, list[int]] = {}

    def run(rank: int, part: DataProto, factor: int) -> DataProto | None:
        seen[rank] = part["uid"].tolist()
        # only collecting ranks have results
        return double(part, factor) if rank // dp == model - 1 else None

    out = execute(plan, run)
    assert out["uid"].tolist() == list(range(rows))
    assert out["y"].tolist() == [i * 30 for i in range(rows)]
    assert len({len(uids) for uids in seen.values()}) == 1  # equal work on all ranks
    assert all(seen[rank] == seen[rank % dp] for rank in seen)  # one data-parallel group, one chunk
    assert PADDING_META not in out.meta


@given(st.integers(1, 20), st.integers(1, 7))
def test_padding_marks_tell_exactly_the_repeated_rows(rows: int, dp: int) -> None:
    plan = plan_call(method_spec(metric), dp, mesh(dp), (batch(rows),), {})
    chunks = execute(plan, lambda rank, part: part)
    real = [part["uid"].tolist()[: len(part) - part.meta.get(PADDING_META, 0)] for part in chunks]
    assert list(chain(*real)) == list(range(rows))


def test_ranks_of_a_group_hold_the_very_same_chunk() -> None:
    plan = plan_call(method_spec(anything), 4, mesh(2, 2), (batch(4),), {})
    assert plan.calls[0].args[0] is plan.calls[2].args[0]
    assert plan.calls[0].args[0] is not plan.calls[1].args[0]
    assert execute(plan, lambda rank, part: part).equals(batch(4))


def test_only_the_columns_read_are_sent_and_missing_ones_are_named() -> None:
    big = batch(4, unused=np.zeros(4))
    plan = plan_call(method_spec(double), 2, mesh(2), (big,), {})
    assert plan.calls[0].args[0].columns == ("uid", "x")
    with pytest.raises(
        SchemaError,
        match=r"double reads column 'x', which is missing from the batch; it has uid, unused",
    ):
        plan_call(method_spec(double), 2, mesh(2), (big.drop(["x"]),), {})
    both = plan_call(
        method_spec(double), 2, mesh(2), (big.select(["uid"]), big.select(["x", "unused"])), {}
    )
    assert [part.columns for part in both.calls[1].args] == [("uid",), ("x",)]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda part: part.select(["uid"]), "did not return column 'y'"),
        (
            lambda part: part.with_columns(y=part["x"]),
            "returned column 'x' not declared in writes",
        ),
        (lambda part: double(part).rows(slice(1)), "must return 2 rows, one per input row; got 1"),
        (lambda part: part["uid"], "got ndarray"),
        (lambda part: None, "got NoneType"),
    ],
)
def test_results_are_held_against_the_declaration(
    result: Callable[[DataProto], Any], text: str
) -> None:
    plan = plan_call(method_spec(double), 2, mesh(2), (batch(4),), {})
    with pytest.raises(SchemaError, match=r"double on rank \d") as caught:
        execute(plan, lambda rank, part: result(part))
    assert text in str(caught.value)


def test_data_parallel_calls_need_batches_of_one_length_and_a_mesh() -> None:
    with pytest.raises(SchemaError, match="requires a DataProto"):
        plan_call(method_spec(anything), 2, mesh(2), (3,), {})
    with pytest.raises(SchemaError, match=r"same length to be split, got \[4, 3\]"):
        plan_call(method_spec(anything), 2, mesh(2), (batch(4), batch(3)), {})
    with pytest.raises(MeshError, match="must define mesh_position"):
        plan_call(method_spec(anything), 2, None, (batch(4),), {})
    with pytest.raises(MeshError, match="all 3 ranks"):
        plan_call(method_spec(anything), 3, mesh(2), (batch(4),), {})


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ([(0, 2, True), (0, 2, False)], "missing data-parallel ranks [1]"),
        ([(0, 2, True), (0, 2, True), (1, 2, True)], "2 in group 0"),
        ([(0, 2, True), (1, 2, False)], "0 in group 1"),
        ([(0, 2, True), (1, 1, True)], "disagree"),
        ([(0, 1, True), (3, 1, True)], "ranks [3] outside 0..0"),
        ([], "at least one"),
    ],
)
def test_a_mesh_that_does_not_cover_the_group_is_refused(
    positions: list[tuple[int, int, bool]], text: str
) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh(tuple(MeshPosition(*position) for position in positions))
    assert text in str(caught.value)


def test_other_modes() -> None:
    @register(Dispatch.ONE_TO_ALL)
    def same(value: int) -> int:
        return value

    @register(Dispatch.ALL_TO_ALL)
    def own(value: int) -> int:
        return value

    @register(Dispatch.RANK_ZERO)
    def zero(value: int) -> int:
        return value

    @register(Dispatch.ONE_TO_ALL, execute=Execute.RANK_ZERO)
    def only_zero(value: int) -> int:
        return value

    def add(rank: int, value: int) -> int:
        return rank + value

    assert execute(plan_call(method_spec(same), 3, None, (5,), {}), add) == [5, 6, 7]
    assert execute(plan_call(method_spec(own), 3, None, ([1, 2, 3],), {}), add) == [1, 3, 5]
    for spec in (method_spec(zero), method_spec(only_zero)):
        plan = plan_call(spec, 3, None, (), {"value": 5})
        assert set(plan.calls) == {0} and execute(plan, add) == 5
    with pytest.raises(
        SchemaError,
        match="own: argument 0 must be a list with one value for each of 3 ranks, got 2 values",
    ):
        plan_call(method_spec(own), 3, None, ([1, 2],), {})


def test_a_custom_pair_splits_and_collects_its_own_way() -> None:
    scatter = custom_dispatch(
        "test_scatter",
        lambda world, mesh, args, kwargs: {
            rank: RankCall((args[0] * rank,), {}) for rank in range(world)
        },
        lambda mesh, results: sum(results.values()),
        needs_mesh=False,
    )

    @register(scatter)
    def work(value: int) -> int:
        return value

    assert (
        execute(plan_call(method_spec(work), 4, None, (10,), {}), lambda rank, value: value) == 60
    )
    with pytest.raises(ValueError, match="already exists"):
        custom_dispatch("test_scatter", scatter.split, scatter.collect)


def test_register_returns_the_function_itself_and_refuses_nonsense() -> None:
    def method() -> None: ...

    assert register(Dispatch.ONE_TO_ALL)(method) is method
    assert method_spec(method).blocking
    with pytest.raises(TypeError, match="decorate it with @register"):
        method_spec(print)
    with pytest.raises(ValueError, match="on rank 0 only"):
        register(Dispatch.DP, execute=Execute.RANK_ZERO)
    with pytest.raises(ValueError, match="distinct column names"):
        register(Dispatch.DP, reads=("a", "a"))
    with pytest.raises(ValueError, match="distinct column names"):
        register(Dispatch.DP, writes="ab")


def test_dataflow_check_names_step_column_and_where_it_comes_from() -> None:
    late = DataflowStep("prepare", reads=("y",), writes=("x",))
    assert check_dataflow([double, late], ["uid", "x"]) == {"uid", "x", "y"}
    with pytest.raises(
        SchemaError,
        match=r"double reads column 'x', which does not exist yet; prepare writes it, but only later",
    ):
        check_dataflow([double, late], ["uid"])
    with pytest.raises(SchemaError, match="no step writes it"):
        check_dataflow([double], ["uid"])


def test_a_worker_module_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, hybridflow.dispatch, hybridflow.device.platform; print({'ray', 'torch', "
        "'pyarrow'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_steps_of_the_main_job_find_their_columns(kl: float) -> None:
    pytest.importorskip("megatron.core")
    from hybridflow.config.schema import ActorConfig, RunConfig
    from hybridflow.trainer.groups import check_steps

    check_steps(RunConfig(actor=ActorConfig(kl_loss_coef=kl)))


# ---- some of the ranks


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), st.integers(1, 9))
def test_a_call_on_some_groups_returns_every_row_once_in_order(
    groups: list[int], rows: int
) -> None:
    # of 5 groups with 2 ranks each
    ranks = sorted(chain.from_iterable((group, group + 5) for group in groups))
    part = mesh(5, 2).of(ranks)
    plan = plan_call(method_spec(double), len(ranks), part, (batch(rows),), {}).on(ranks)
    assert sorted(plan.calls) == ranks
    found = execute(plan, lambda rank, *args: double(*args))
    assert found["uid"].tolist() == list(range(rows)) and found["y"].tolist() == [
        20 * i for i in range(rows)
    ]


def test_a_part_of_a_data_parallel_group_is_refused() -> None:
    with pytest.raises(MeshError, match=r"cover data-parallel groups \[1\] only partly"):
        mesh(2, 2).of([0, 2, 1])
    with pytest.raises(MeshError, match="at least one rank"):
        mesh(2).of([])
