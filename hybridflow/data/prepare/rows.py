"""Row formats of the prepared files: prompts {data_source, prompt, ability, reward_model,
extra_info}, demonstrations {prompt, response}, pairs {prompt, chosen, rejected}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IMAGES = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def prompt_row(
    data_source: str, question: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Build one row of train.parquet or test.parquet, with the question as a single user
    message."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def write_prompts(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    extra_info: Mapping[str, pa.DataType],
    ground_truth: pa.DataType | None = None,
    images: bool = False,
) -> int:
    """Write prompt rows. Returns the number of rows.

    Args:
        path: the parquet file.
        rows: as built by `prompt_row`.
        extra_info: field types of the extra_info struct; with them, an empty file has the same
            schema as a full one.
        ground_truth: Arrow type of the ground truth; None means text.
        images: whether the rows have a column `images`.
    """
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", MESSAGES),
            ("ability", pa.string()),
            (
                "reward_model",
                pa.struct([("style", pa.string()), ("ground_truth", ground_truth or pa.string())]),
            ),
            ("extra_info", pa.struct(list(extra_info.items()))),
            *([("images", IMAGES)] if images else []),
        ]
    )
    return _write(path, rows, schema)


def write_demonstrations(
    path: Path, rows: Sequence[Mapping[str, Any]], images: bool = False
) -> int:
    """Write rows {prompt: messages, response: str}. With `images`, the rows also have an `images`
    column. Returns the number of rows.
    """
    fields = [("prompt", MESSAGES), ("response", pa.string())]
    return _write(path, rows, pa.schema(fields + ([("images", IMAGES)] if images else [])))


def write_pairs(path: Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """Write rows {prompt: messages, chosen: str, rejected: str}. Returns the number of rows."""
    return _write(
        path,
        rows,
        pa.schema([("prompt", MESSAGES), ("chosen", pa.string()), ("rejected", pa.string())]),
    )


def _write(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> int:
    table = pa.Table.from_pylist(list(map(dict, rows)), schema=schema)
    pq.write_table(table, path)
    return table.num_rows
