"""Parts of the controller that need no Ray: calls on their way to a rank, headers, several roles in
one process, the order of nodes."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import SamplingConfig
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register
from hybridflow.errors import ClusterLostError, ResourceError, WorkerError
from hybridflow.process.children import state_of
from hybridflow.single_controller import colocated, future
from hybridflow.single_controller.cluster import _ip_key, wait_for_nodes
from hybridflow.single_controller.host import Failure, Host, address_of
from hybridflow.single_controller.joining import find_token, require_listener
from hybridflow.single_controller.stored import (
    INLINE_BYTES,
    At,
    ColumnRecipe,
    Header,
    Recipe,
    Request,
    gather,
    is_small,
)
from tests.unit.single_controller.replies import Reply, call_of

CONTEXT = WorkerContext(0, 1, 0, "127.0.0.1", 1, "here", Path("log"))


class Actor:
    def __init__(self, context: WorkerContext, scale: int) -> None:
        self.scale = scale

    def mesh_position(self) -> MeshPosition:
        return MeshPosition(0, 1, True)

    @register(Dispatch.DP, writes=("x", "rows"))
    def scaled(self, batch: DataProto, extra: DataProto, *, power: int) -> DataProto:
        x = (batch["x"] * self.scale) ** power
        return DataProto.from_columns(
            {"x": x, "rows": Jagged.from_rows([row * 2 for row in extra.jagged("rows")], np.int64)}
        )

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ValueError("no")


class Reference:
    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank

    @register(Dispatch.ONE_TO_ALL)
    def log_probs(self) -> str:
        return f"reference {self.rank}"


def host(worker: Any) -> Host:
    made = Host()
    made._worker = worker
    return made


def request() -> tuple[Request, tuple[DataProto, ...]]:
    """A batch by place, another whose column comes from two stored parts, and a keyword."""
    parts = [
        DataProto.from_columns({"held": Jagged.from_rows(rows, np.int64)})
        for rows in ([[1], [2, 2]], [[3, 3, 3], []])
    ]
    rows = ColumnRecipe("rows", ((1, "held"), (2, "held")), np.array([2, 0, 1]))
    recipe = Recipe(DataProto.from_columns({"uid": np.arange(3)}), (rows,), ("uid", "rows"))
    return Request("scaled", (At(0), recipe, 2), ("power",)), (
        DataProto.from_columns({"x": np.array([1.0, 2.0, 3.0])}),
        *parts,
    )


def test_a_request_is_carried_out_with_the_objects_sent_along() -> None:
    call, objects = request()
    found = host(Actor(CONTEXT, 10)).call(pickle.loads(pickle.dumps(call)), *objects)
    assert found["x"].tolist() == [100, 400, 900]
    assert [row.tolist() for row in found["rows"]] == [[6, 6, 6], [2], [4, 4]]


def test_a_stored_result_is_a_header_with_the_small_columns_and_an_object_for_each() -> None:
    call, objects = request()
    apart = replace(call, together=(("x",), ("rows",)), inline_bytes=24)
    header, x, rows = host(Actor(CONTEXT, 1)).call_stored(apart.packed(), *objects)
    assert isinstance(header, Header) and header.rows == 3 and header.nbytes["x"] == 24
    assert header.small.columns == ("x",) and header.small["x"].tolist() == x["x"].tolist()
    assert header.lengths["rows"].tolist() == rows.lengths("rows").tolist() == [3, 1, 2]
    as_one = replace(call, together=(("rows", "x"),), inline_bytes=24)
    header, both = host(Actor(CONTEXT, 1)).call_stored(as_one.packed(), *objects)
    assert header.small.columns == ("x",) and both.columns == ("rows", "x") and both.meta == {}
    assert both["x"].tolist() == x["x"].tolist() and both.jagged("rows").equals(rows["rows"])


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(
    values=st.lists(PLAIN | st.builds(At, st.integers(0, 9)), max_size=4),
    together=st.lists(st.lists(st.text(), max_size=2).map(tuple), max_size=2),
    inline_bytes=st.integers(0),
)
def test_a_request_with_plain_arguments_is_sent_as_bytes_and_arrives_unchanged(
    values: list[Any], together: list[tuple[str, ...]], inline_bytes: int
) -> None:
    call = Request("call", tuple(values), ("b",), tuple(together), inline_bytes)
    sent = call.packed()
    assert isinstance(sent, bytes)
    arrived = Request.unpacked(sent)
    assert arrived == call and [*map(type, arrived.values)] == [*map(type, call.values)]


@pytest.mark.parametrize("value", [[0], (0,), {"a": 1}, np.float32(1), Path("a"), b"a"])
def test_a_request_with_other_arguments_is_sent_as_it_is(value: Any) -> None:
    call = Request("call", (value,), ())
    assert call.packed() is call and Request.unpacked(call) is call


def test_an_error_comes_back_as_a_value() -> None:
    assert host(Actor(CONTEXT, 1)).call(Request("fail", (), ())) == Failure(
        "ValueError", "no", None
    )


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), data=st.data())
def test_rows_are_gathered_from_parts_in_any_order(sizes: list[int], data: st.DataObject) -> None:
    ends = np.cumsum(sizes)
    rows = int(ends[-1])
    whole = DataProto.from_columns(
        {"x": Jagged.from_rows([np.full(row % 3, row) for row in range(rows)], np.int64)}
    )
    parts = [whole.rows(slice(end - n, end)) for n, end in zip(sizes, ends.tolist(), strict=True)]
    index = np.asarray(
        data.draw(st.lists(st.integers(0, rows - 1), max_size=12)) if rows else [], dtype=np.int64
    )
    found = gather(parts, index).jagged("x")
    assert [row.tolist() for row in found] == [[row] * (row % 3) for row in index.tolist()]
    with pytest.raises(IndexError, match=f"the parts have {rows} rows"):
        gather(parts, np.array([rows]))


def test_consecutive_rows_of_one_part_are_views() -> None:
    parts = [
        DataProto.from_columns({"x": np.arange(4)}),
        DataProto.from_columns({"x": np.arange(4, 9)}),
    ]
    assert np.shares_memory(gather(parts, np.arange(5, 8))["x"], parts[1]["x"])


@pytest.mark.parametrize(
    ("value", "small"),
    [
        ("text", True),
        (None, True),
        (SamplingConfig(), True),
        ([1] * 100, True),
        ({"a": (1, Path("b"))}, True),
        ([1] * 100_000, False),
        ("x" * INLINE_BYTES, False),
        ({1, 2}, False),
        (np.zeros(10), True),
        (np.zeros(INLINE_BYTES), False),
        (DataProto.from_columns({"x": np.zeros(10)}), True),
        (DataProto.from_columns({"x": np.zeros(INLINE_BYTES)}), False),
    ],
)
def test_only_small_values_travel_inside_the_call(value: Any, small: bool) -> None:
    assert is_small(value) is small


def test_roles_of_one_process_are_called_through_their_own_classes() -> None:
    both = colocated(actor=Actor, reference=Reference)
    worker = host(both(CONTEXT, (10,), ()))
    assert address_of(both, Reference.log_probs, None) == "reference.log_probs"
    assert worker.call(Request("reference.log_probs", (), ())) == "reference 0"
    assert worker._worker.mesh_position() == MeshPosition(0, 1, True)
    assert (
        address_of(Actor, Actor.scaled, None)
        == address_of(Actor, Actor.scaled, "actor")
        == "scaled"
    )
    with pytest.raises(TypeError, match="log_probs is not a method of Actor"):
        address_of(Actor, Reference.log_probs, None)
    assert both.__name__ == "ActorAndReference" and hasattr(both, "mesh_position")
    assert not hasattr(colocated(reference=Reference), "mesh_position")
    with pytest.raises(
        AttributeError, match=r"the role of 'critic\.save' must be one of actor, reference"
    ):
        getattr(worker._worker, "critic.save")


def test_one_class_may_serve_several_roles_and_the_call_says_which() -> None:
    both = colocated(first=Actor, second=Actor)
    worker = host(both(CONTEXT, (2,), (3,)))
    assert address_of(both, Actor.fail, "second") == "second.fail"
    assert worker.call(Request("second.fail", (), ())) == Failure("ValueError", "no", None)
    with pytest.raises(TypeError, match="fail belongs to first and second: pass role="):
        address_of(both, Actor.fail, None)
    with pytest.raises(TypeError, match="fail is not a method of third"):
        address_of(both, Actor.fail, "third")


def test_nodes_are_ordered_by_address_as_numbers() -> None:
    assert sorted(["10.0.0.10", "10.0.0.9", "9.0.0.1"], key=_ip_key) == [
        "9.0.0.1",
        "10.0.0.9",
        "10.0.0.10",
    ]


@pytest.fixture
def one_answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], future.Future]:
    """A call on two ranks, made with the process id of the second: the first answers that the
    connection is lost, the second says nothing, and Ray tells of its death after a while when its
    process has ended."""
    import ray

    monkeypatch.setattr(future, "_GRACE_S", 0.0)

    def made(pid: int) -> future.Future:
        living = Reply()
        silent = Reply()
        living.set_result(Failure("RuntimeError", "Connection closed by peer", None))
        if state_of(pid) == "":
            threading.Timer(0.3, silent.set_exception, [ray.exceptions.RayActorError()]).start()
        return call_of({0: living, 1: silent}, [os.getpid(), pid])

    return made


def test_a_rank_whose_process_has_ended_is_the_cause_however_late_ray_tells(
    one_answer: Callable[[int], future.Future],
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(WorkerError, match="the worker process died") as caught:
        one_answer(ended.pid).result()
    assert caught.value.rank == 1


def test_a_rank_that_was_stopped_is_the_cause_of_what_another_raises(
    one_answer: Callable[[int], future.Future],
) -> None:
    stopped = subprocess.Popen(["sleep", "600"])
    try:
        stopped.send_signal(signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)
        with pytest.raises(WorkerError, match="is stopped") as caught:
            one_answer(stopped.pid).result()
    finally:
        stopped.kill()
        stopped.wait()
    assert caught.value.rank == 1


def test_what_a_rank_raises_is_the_cause_while_the_others_work(
    one_answer: Callable[[int], future.Future],
) -> None:
    with pytest.raises(WorkerError, match="Connection closed by peer") as caught:
        one_answer(os.getpid()).result()
    assert caught.value.rank == 0


def test_a_call_ends_as_soon_as_no_answer_can_come() -> None:
    """The call may be made by a thread that nobody interrupts, while its cluster is given up."""

    def lost() -> None:
        raise ClusterLostError("Ray's raylet has ended")

    with pytest.raises(ClusterLostError, match="raylet has ended"):
        call_of({0: Reply()}, [os.getpid()], check=lost).result()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{home}/.hybridflow-ray-token"}),
        ({"RAY_AUTH_TOKEN": "t"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}),
        ({"RAY_AUTH_TOKEN_PATH": "/t"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t"}),
        (
            {"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"},
            {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t"},
        ),
    ],
)
def test_a_driver_that_joins_uses_the_token_that_ray_was_started_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: dict[str, str],
) -> None:
    """As `launch/ray/cluster.sh` says: on the machine of the head the command needs no variable."""
    (tmp_path / ".hybridflow-ray-token").write_text("t")
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), **environment})
    find_token()
    found = {name: os.environ[name] for name in names if name in os.environ}
    assert found == {name: value.format(home=tmp_path) for name, value in expected.items()}
    (tmp_path / ".hybridflow-ray-token").unlink()
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    find_token()
    assert set(os.environ) == {"HOME"}


@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "says nothing"])
def test_a_dead_head_is_given_up_by_the_deadline(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """Ray's client tries for half a minute whatever its caller wants."""
    asked = threading.Event()

    class Client:
        def __init__(self, address: str) -> None:
            asked.set()
            threading.Event().wait()  # for ever

    monkeypatch.setitem(sys.modules, "ray._private.services", SimpleNamespace(GcsClient=Client))
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        if listens:
            head.listen()
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(
            ResourceError, match=f"0 of 2 nodes have joined Ray at {address} .*it did not answer"
        ):
            wait_for_nodes(address, 2, 0.2)
        assert asked.is_set()
        with (
            nullcontext()
            if listens
            else pytest.raises(ResourceError, match=f"{address}.*correct cluster.address")
        ):
            require_listener(address, 0.5)


def test_a_cluster_named_otherwise_is_left_to_ray() -> None:
    for address in ("ray://head:10001", "head"):
        require_listener(address, 0.5)
