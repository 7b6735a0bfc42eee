"""Equality of columns and meta values, whatever rows hold; types a column cannot have; round trips
of objects."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.batch import DataProto, Jagged, from_table, to_table
from hybridflow.errors import SchemaError

NAN = float("nan")


def objects(*values: Any) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        column[i] = value
    return column


def of(value: Any, **meta: Any) -> DataProto:
    return DataProto.from_columns({"o": objects(value)}, meta)


VALUES = {
    "an array with NaN": np.array([NAN, 1.0]),
    "an array of objects": objects("a", None),
    "an array of objects with NaN": objects(NAN, np.arange(2)),
    "an array of arrays": objects(np.arange(2), np.arange(3)),
    "a mapping with NaN": {"a": [NAN, {"b": np.array([NAN])}]},
    "a tuple": (1, (2.0, NAN)),
    "integer keys": {1: "a", "1": "b", (2, 3): None},
    "a key that looks like a tag": {"$tuple": [1]},
    "numpy scalars": [np.float32(1.5), np.int64(3), np.bool_(True)],
    "a matrix": np.arange(6, dtype=np.int16).reshape(2, 3),
    "nothing": {},
}
TENSORS = {
    "a tensor": torch.arange(3),
    "a tensor with NaN": torch.tensor([NAN, 1.0]),
    "a tensor of one element": torch.tensor([NAN]),
    "a bfloat16 tensor": torch.ones(2, dtype=torch.bfloat16),
    "a list of tensors": [torch.zeros(2), (torch.ones(1),)],
}


@pytest.mark.parametrize("value", [*VALUES.values(), *TENSORS.values()], ids=[*VALUES, *TENSORS])
def test_rows_of_any_kind_equal_their_copies(value: Any) -> None:
    batch = of(value)
    twin = of(copy.deepcopy(value))
    assert batch.equals(twin) and batch.union(twin).equals(batch)
    assert pickle.loads(pickle.dumps(batch)).equals(batch)
    assert not batch.equals(of([value]))


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_objects_keep_types_and_keys_through_a_table(value: Any) -> None:
    assert from_table(to_table(of(value))).equals(of(value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(2), np.arange(2.0)),
        (np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int64)),
        (np.zeros(2), np.zeros((2, 1))),
        (objects(np.arange(2)), objects(np.arange(2.0))),
        (torch.zeros(2), torch.zeros(1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0])),
        (torch.zeros(2), np.zeros(2)),
        (1, 1.0),
        (1, True),
        ((1, 2), [1, 2]),
        ({1: 2}, {"1": 2}),
        (NAN, 0.0),
    ],
)
def test_values_of_other_types_or_shapes_differ(one: Any, other: Any) -> None:
    assert not of(one).equals(of(other)) and not of(other).equals(of(one))
    with pytest.raises(SchemaError, match="column 'o' is in both batches with different values"):
        of(one).union(of(other))


def test_values_that_cannot_be_compared_are_a_schema_error() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(SchemaError, match=r"of type .*Odd: no"):
        of(Odd()).equals(of(Odd()))


@pytest.mark.parametrize(
    "value", [NAN, [1.0, {"a": NAN}], (1, 2), {1: 2}], ids=["nan", "nested", "tuple", "keys"]
)
def test_meta_values_can_be_concatenated_and_survive_a_table(value: Any) -> None:
    batch = of(1, x=value)
    twin = of(1, x=copy.deepcopy(value))
    assert (
        batch.equals(twin)
        and len(DataProto.concat([batch, twin])) == 2
        and batch.union(twin).equals(batch)
    )
    assert from_table(to_table(batch)).equals(batch)
    with pytest.raises(SchemaError, match="meta 'x'"):
        DataProto.concat([batch, of(1, x=[value])])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_tensors_are_a_schema_error_that_names_the_column(dtype: torch.dtype) -> None:
    values = torch.zeros(1).to(dtype)
    for column in (values, (values, torch.tensor([0, 1]))):
        with pytest.raises(
            SchemaError, match=rf"column 'w' has dtype {dtype}, which numpy does not support"
        ):
            of(1).with_torch(w=column)


def test_floats_of_more_than_64_bits_are_a_schema_error() -> None:
    with pytest.raises(SchemaError, match="column 'w' has unsupported dtype"):
        DataProto.from_columns({"w": np.zeros(2, np.longdouble)})
    with pytest.raises(SchemaError, match="numeric"):
        Jagged(np.zeros(2, np.longdouble), np.array([0, 2]))


def test_columns_of_foreign_byte_order_have_an_arrow_form() -> None:
    table = to_table(DataProto.from_columns({"w": np.arange(3, dtype=">i4")}))
    assert from_table(table)["w"].tolist() == [0, 1, 2]
