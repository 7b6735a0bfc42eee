"""Dumps of rollouts and validation answers in parquet format, one file per step:
`rollouts/step_000001.parquet`, `validation/step_000000.parquet`.

All columns are optional. Columns in `ROLLOUT_COLUMNS` have a fixed type. Columns in `TOKEN_COLUMNS`
contain one number per prompt or response token, as used in the step. Other columns are written as
text, or as JSON if a value is not text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import Column, DataProto, Jagged, read_parquet, write_parquet
from hybridflow.config.role_table import CRITICS, ROLES
from hybridflow.errors import SchemaError

# type of each column's values (`Jagged`: rows of integer pairs), and their meaning
ROLLOUT_COLUMNS: dict[str, tuple[type, str]] = {
    "step": (np.int64, "training step of the row"),
    "uid": (np.int64, "group of the row within its step: the samples of one prompt share it"),
    "data_source": (str, "data source, which selects the verifier"),
    "prompt_text": (str, "decoded prompt with the chat template"),
    "response_text": (str, "decoded response"),
    "ground_truth": (str, "expected answer; JSON when it is not text"),
    "score": (np.float32, "reward from the verifier, before any KL penalty"),
    "rm_score": (np.float32, "raw score of the reward model, before squash and weight"),
    "advantage": (np.float32, "advantage of the sample; mean over its sampled tokens"),
    "prompt_length": (np.int32, "tokens of the prompt"),
    "response_length": (np.int32, "tokens of the response"),
    "response_mask": (
        Jagged,
        (
            "[1: sampled by the policy, 0: inserted by a tool or an environment; run length] over "
            "the response"
        ),
    ),
    "finish_reason": (str, "stop | length | abort"),
    "weight_version": (str, "weight version that sampled the last token"),
    "response_versions": (
        Jagged,
        "[weight version, run length] over the response",
    ),
    "logprob_diff_mean": (
        np.float32,
        "mean over sampled tokens of |rollout - trainer| log-probability",
    ),
    "logprob_diff_max": (
        np.float32,
        "largest |rollout - trainer| log-probability of a sampled token",
    ),
    "reward_extra": (str, "JSON of the reward's extra values"),
    "reward_failure": (str, "why the reward returned no score"),
    "messages": (str, "JSON of the answers and observations of a conversation"),
    "turns": (np.int32, "answers in the conversation"),
    "tool_calls": (np.int32, "tool calls of the conversation"),
    "agent_failure": (str, "error of the agent loop"),
    "extra_info": (str, "JSON of the dataset row's extra_info"),
    "greedy_score": (np.float32, "weighted score of the most likely answer to the prompt"),
}
TOKEN_COLUMNS: dict[str, str] = {
    "prompt_ids": "tokens of the prompt",
    "response_ids": "tokens of the response",
    "rollout_log_probs": "log-probability of each response token in the engine that sampled it",
    "support_sizes": (
        "number of candidates that each response token was sampled from; 0: the whole vocabulary"
    ),
    "support_ids": "ids of the candidates, concatenated over the response tokens",
    "old_log_probs": "log-probability in the trainer, before the step's updates",
    "ref_log_probs": "log-probability under the reference's weights",
    "advantages": "advantage of each response token",
}
for _name in CRITICS.values():
    _prefix = ROLES[_name].prefix
    _of = f"of the {_name.replace('_', ' ')} at each response token"
    TOKEN_COLUMNS |= {f"{_prefix}values": f"value {_of}", f"{_prefix}returns": f"return {_of}"}
MADE_WITH = "made_with"  # key in the file's meta
_STEP_FILE = re.compile(r"step_([0-9]{1,15})\.parquet")


def dump_path(folder: str | Path, step: int) -> Path:
    """Return the path of a step's dump: `FOLDER/step_000012.parquet`."""
    return Path(folder) / f"step_{step:06d}.parquet"


def dump_rollouts(
    path: str | Path,
    rows: Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Sequence[Any]]],
    made_with: Mapping[str, Any] | None = None,
) -> Path:
    """Write columns of equal length, given whole or in consecutive pieces, to a parquet file. The
    write is atomic.

    Args:
        made_with: identity of the model and tokenizer, stored in the file's metadata.
    """
    pieces = [rows] if isinstance(rows, Mapping) else rows
    meta = {MADE_WITH: dict(made_with or {})}

    def batches() -> Iterator[DataProto]:
        for piece in pieces:
            columns = {name: _column(name, values) for name, values in piece.items()}
            yield DataProto(columns, meta)

    write_parquet(path, batches())
    return Path(path)


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a dump as dictionaries, without the token columns. Raises DataError if the
    file cannot be read."""
    batch = read_parquet(path)
    columns = {}
    for name in batch.columns:
        if name not in TOKEN_COLUMNS:
            held = batch[name]
            if isinstance(held, Jagged):
                columns[name] = [row.tolist() for row in held]
            else:
                columns[name] = held.tolist()
    rows: list[dict[str, Any]] = []
    for values in zip(*columns.values(), strict=True):
        rows.append(dict(zip(columns, values, strict=True)))
    return rows


def list_dumps(folder: str | Path) -> list[tuple[int, Path]]:
    """Return (step, file) for every dump in a folder, ordered by step; empty if the folder does not
    exist."""
    found = (
        (_STEP_FILE.fullmatch(path.name), path) for path in Path(folder).glob("step_*.parquet")
    )
    dumps = []
    for match, path in found:
        if match:
            dumps.append((int(match[1]), path))
    return sorted(dumps)


def remove_dumps_after(folder: str | Path, step: int) -> int:
    """Delete the dumps of later steps, because a resumed run repeats them. Returns the number of
    deleted files."""
    late = [path for at, path in list_dumps(folder) if at > step]
    for path in late:
        path.unlink()
    return len(late)


def remove_old_dumps(folder: str | Path, newest: int, also_every: int) -> None:
    """Delete old dumps. Keep the newest `newest` dumps and, if `also_every` is not 0, those whose
    step is a multiple of `also_every`.
    """
    for step, path in list_dumps(folder)[:-newest]:
        if not also_every or step % also_every:
            with suppress(OSError):  # tried again after the next dump
                path.unlink()


def _column(name: str, values: Any) -> Column:
    kind = ROLLOUT_COLUMNS.get(name, (str, ""))[0]
    if isinstance(values, Jagged) and (kind is Jagged or name in TOKEN_COLUMNS):
        return values
    try:
        if kind is Jagged:
            pairs = [np.reshape(value, (-1, 2)) for value in values]
            return Jagged.from_rows(pairs, np.int64)
        if kind is str:
            return np.array(list(map(_text, values)), object)
        return np.asarray(values, kind)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"rollout column {name!r}: expected {kind.__name__}: {error}") from error


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    )
    # a lone surrogate from a decoder is not valid parquet text
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
