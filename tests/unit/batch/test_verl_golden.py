"""Batch operations against verl 0.9.1 where both define an answer. The answers were written once by
tests/golden/make_verl_batch_ops.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto
from hybridflow.dispatch import Dispatch, Execute, Mesh, MeshPosition, MethodSpec, plan_call
from hybridflow.errors import SchemaError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "verl_batch_ops.json").read_text())
SPEC = MethodSpec("echo", Dispatch.DP, Execute.ALL, True, (), ())


def batch(rows: int, start: int = 0) -> DataProto:
    values = (np.arange(start * 3, (start + rows) * 3, dtype=np.float32) / np.float32(7)).reshape(
        rows, 3
    )
    text = np.array([f"t{i}" for i in range(start, start + rows)], dtype=object)
    return DataProto.from_columns(
        {"ids": np.arange(start, start + rows), "values": values, "text": text},
        {"temperature": 0.5},
    )


def plain(data: DataProto) -> dict[str, Any]:
    return {
        "columns": {name: data[name].tolist() for name in data.columns},
        "meta": dict(data.meta),
    }


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(
            same(a, b) for a, b in zip(ours, theirs, strict=True)
        )
    return plain(ours) == theirs


OPERATIONS: dict[str, Callable[..., Any]] = {
    "select": lambda b, names: b.select(names),
    "rows_list": lambda b, index: b.rows(index),
    "rows_repeated": lambda b, index: b.rows(index),
    "rows_mask": lambda b, mask: b.rows(mask),
    "slice": lambda b, start, stop: b.rows(slice(start, stop)),
    "slice_step": lambda b, start, stop, step: b.rows(slice(start, stop, step)),
    "repeat": lambda b, n: b.repeat(n),
    "rename": lambda b, names: b.rename(names),
    "split": lambda b, size: b.split(size),
    "chunk": lambda b, n: b.chunk(n),
    "reorder": lambda b, order: b.reorder(order),
    "pad": lambda b, n: b.pad_to_divisor(n)[0],
    "unpad": lambda b, n: b.pad_to_divisor(n)[0].unpad(-len(b) % n),
    "concat": lambda b, rows: DataProto.concat([b, batch(rows, len(b))]),
    "union": lambda b: b.union(b.rename({"ids": "uid"})),
}


@pytest.mark.parametrize(
    "case",
    GOLDEN["operations"],
    ids=lambda case: f"{case['op']}-{case['rows']}-{str(case['args'])[:20]}",
)
def test_batch_operations_answer_as_verl_does(case: dict[str, Any]) -> None:
    rows = batch(case["rows"])
    if case["op"] == "union_error":
        assert case["out"]
        with pytest.raises(SchemaError, match="different values"):
            rows.union(batch(case["rows"], start=1))
        return
    assert same(OPERATIONS[case["op"]](rows, *case["args"]), case["out"])
    if "size" in case:
        assert rows.pad_to_divisor(*case["args"])[1] == case["size"]


@pytest.mark.parametrize("case", GOLDEN["dispatch"], ids=lambda case: str(case["dp_ranks"]))
def test_each_rank_gets_and_the_driver_collects_what_verl_gives(case: dict[str, Any]) -> None:
    dp_size = max(case["dp_ranks"]) + 1
    positions = zip(case["dp_ranks"], case["collects"], strict=True)
    mesh = Mesh(tuple(MeshPosition(dp, dp_size, collects) for dp, collects in positions))
    plan = plan_call(SPEC, len(mesh.positions), mesh, (batch(case["rows"]),), {})
    got = [plan.calls[rank].args[0] for rank in range(len(mesh.positions))]
    assert same(got, case["by_rank"])
    assert same(plan.collect(dict(enumerate(got))), case["collected"])


@pytest.mark.parametrize(
    "case", GOLDEN["padded_dispatch"], ids=lambda case: f"{case['rows']}-over-{case['ranks']}"
)
def test_padding_is_added_and_undone_as_verl_does(case: dict[str, Any]) -> None:
    mesh = Mesh(tuple(MeshPosition(rank, case["ranks"], True) for rank in range(case["ranks"])))
    plan = plan_call(SPEC, case["ranks"], mesh, (batch(case["rows"]),), {})
    got = [plan.calls[rank].args[0] for rank in range(case["ranks"])]
    assert [len(part) for part in got] == case["sizes"]
    assert plan.collect(dict(enumerate(got)))["ids"].tolist() == case["ids"]
