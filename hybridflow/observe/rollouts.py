"""Dumps of rollouts and validation answers as parquet: one file a step, `rollouts/step_000001.parquet`,
`validation/step_000000.parquet`.

The columns of `ROLLOUT_COLUMNS` have a fixed type, wherever they appear; every one may be left out. Other columns are
kept with the type that Arrow finds; values that Arrow cannot take (mixed types) are written as JSON text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.errors import DataError, SchemaError

ROLLOUT_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "training step that the row belongs to"),
    "uid": (pa.int64(), "prompt of the dataset: the samples of one group share it"),
    "data_source": (pa.string(), "which verifier scored it"),
    "prompt_text": (pa.string(), "decoded prompt with the chat template"),
    "response_text": (pa.string(), "decoded response"),
    "ground_truth": (pa.string(), "expected answer; JSON when it is not text"),
    "score": (pa.float32(), "reward from the verifier, before any KL penalty"),
    "rm_score": (pa.float32(), "score of the reward model as it gives it, before squash and weight"),
    "advantage": (pa.float32(), "advantage of the sample; mean over its tokens"),
    "prompt_length": (pa.int32(), "tokens of the prompt"),
    "response_length": (pa.int32(), "tokens of the response"),
    "finish_reason": (pa.string(), "stop | length | abort"),
    "weight_version": (pa.string(), "version of the weights that made the last token"),
    "response_versions": (
        pa.list_(pa.list_(pa.int64())),
        "[version of the weights, tokens that they made in a row] through the response",
    ),
    "logprob_diff_mean": (pa.float32(), "mean over tokens of |rollout - trainer| log-probability"),
    "logprob_diff_max": (pa.float32(), "largest |rollout - trainer| log-probability of a token"),
    "reward_extra": (pa.string(), "JSON of what the reward returned beside the score"),
    "extra_info": (pa.string(), "JSON of the dataset row's extra_info"),
}
_STEP_FILE = re.compile(r"step_(\d+)\.parquet")


def dump_path(folder: str | Path, step: int) -> Path:
    """The file of a step: `FOLDER/step_000012.parquet`."""
    return Path(folder) / f"step_{step:06d}.parquet"


def dump_rollouts(path: str | Path, rows: Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Sequence[Any]]]) -> Path:
    """Write columns of equal length to a parquet file, or pieces of them one after another. The file appears whole or
    not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with ExitStack() as stack:
            writer: pq.ParquetWriter | None = None
            for piece in [rows] if isinstance(rows, Mapping) else rows:
                table = _table(path, piece)
                writer = writer or stack.enter_context(pq.ParquetWriter(temporary, table.schema, compression="zstd"))
                writer.write_table(table.cast(writer.schema))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _table(path: Path, rows: Mapping[str, Sequence[Any]]) -> pa.Table:
    lengths = {name: len(values) for name, values in rows.items()}
    if len(set(lengths.values())) > 1:
        raise SchemaError(
            f"{path}: rollout columns of unequal length: " + ", ".join(f"{name} {n}" for name, n in lengths.items())
        )
    return pa.table({name: _column(name, list(values)) for name, values in rows.items()})


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a dump as dictionaries; DataError when the file cannot be read."""
    try:
        with pq.ParquetFile(path) as file:  # not read_table: it takes a run folder named `lr=1` for a partition
            rows: list[dict[str, Any]] = file.read().to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    return rows


def list_dumps(folder: str | Path) -> list[tuple[int, Path]]:
    """(step, file) of every dump in a folder, by step; a missing folder has none."""
    found = ((_STEP_FILE.fullmatch(path.name), path) for path in Path(folder).glob("step_*.parquet"))
    return sorted((int(match[1]), path) for match, path in found if match)


def remove_dumps_after(folder: str | Path, step: int) -> int:
    """Delete the dumps of later steps, on resume; returns how many."""
    late = [path for at, path in list_dumps(folder) if at > step]
    for path in late:
        path.unlink()
    return len(late)


def _column(name: str, values: list[Any]) -> pa.Array:
    plain = [value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value for value in values]
    wanted = ROLLOUT_COLUMNS.get(name)
    if wanted is None:
        try:
            return pa.array(plain)
        except (pa.ArrowException, TypeError):
            return pa.array([_text(value) for value in plain], pa.string())
    if pa.types.is_string(wanted[0]):
        return pa.array([_text(value) for value in plain], pa.string())
    try:
        return pa.array(plain, wanted[0])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SchemaError(f"rollout column {name!r}: expected {wanted[0]}: {error}") from error


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    # a lone surrogate from a decoder is no valid parquet text
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
