"""Datasets in memory: parquet rows checked and tokenized once when the job starts, handed out as `DataProto`
batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.config.schema import DataConfig
from hybridflow.data.parquet import Row, read_rows
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError

log = logging.getLogger(__name__)

_TRUNCATIONS = ("error", "left", "right", "middle")


class PromptDataset:
    """Prompts to sample responses for.

    Required columns: `data.prompt_key` (chat messages), data_source (string), reward_model (struct with ground_truth).
    Optional: extra_info (struct). A prompt of more than `data.max_prompt_length` tokens (chat template included) is
    dropped with `filter_overlong_prompts`, else refused or cut as `data.truncation` says; `left` and `right` name the
    end that is cut off.

    Args:
        files: parquet files, read in order.
        tokenizer: its chat template renders the prompts.
        config: the `data` section.
        max_rows: rows kept from the top, after filtering; None keeps all.

    Attributes:
        num_filtered, num_truncated: overlong prompts that were dropped, cut.

    Raises:
        DataError: a file, column or row is missing or malformed, a prompt is too long, or no row is left.
        ConfigError: `data.truncation` is unknown.
    """

    def __init__(
        self, files: Sequence[str | Path], tokenizer: Tokenizer, config: DataConfig, *, max_rows: int | None = None
    ) -> None:
        _check_truncation(config)
        self.num_filtered = self.num_truncated = 0
        columns: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "data_source", "ground_truth", "extra_info")
        }
        for row in _rows(files, (config.prompt_key, "data_source", "reward_model"), ("extra_info",)):
            if max_rows is not None and len(columns["prompt_ids"]) >= max_rows:
                break
            ids = _prompt_ids(row, tokenizer, config)
            if len(ids) > config.max_prompt_length:
                if config.filter_overlong_prompts:
                    self.num_filtered += 1
                    continue
                ids = _shorten(ids, row, config)
                self.num_truncated += 1
            columns["prompt_ids"].append(ids)
            columns["data_source"].append(row.text("data_source"))
            columns["ground_truth"].append(_ground_truth(row))
            columns["extra_info"].append(row.mapping("extra_info"))
        _report(files, len(columns["prompt_ids"]), self.num_filtered, self.num_truncated)
        self._rows = _batch(columns, ragged=("prompt_ids",))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def data_sources(self) -> list[str]:
        """The distinct data sources, sorted."""
        return sorted(set(self._rows["data_source"].tolist()))

    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        """The rows at `indices` [B], in that order; an index may repeat.

        Columns: prompt_ids (jagged int64), data_source, ground_truth, extra_info (objects [B]), index (int64 [B], row
        of this dataset).

        Raises:
            IndexError: an index is negative or beyond the dataset.
        """
        return _take(self._rows, indices)


class SftDataset:
    """Demonstrations: rows {prompt: chat messages, response: string} as prompt ids and response ids that end with eos.

    A prompt beyond `data.max_prompt_length` or a response (eos included) beyond `data.max_response_length` is dropped
    with `filter_overlong_prompts` and refused with `truncation: error`. With another truncation the prompt is cut as
    for prompts and the response on the right, so that a cut response does not end with eos.

    Args:
        files: parquet files, read in order.
        tokenizer: its chat template renders the prompts; the response is encoded as plain text.
        config: the `data` section.
        response_key: column of the response (`sft.response_key`).

    Attributes:
        num_filtered, num_truncated: overlong rows that were dropped, cut.

    Raises:
        DataError, ConfigError: as for `PromptDataset`.
    """

    def __init__(
        self, files: Sequence[str | Path], tokenizer: Tokenizer, config: DataConfig, response_key: str = "response"
    ) -> None:
        _check_truncation(config)
        self.num_filtered = self.num_truncated = 0
        columns: dict[str, list[Any]] = {"prompt_ids": [], "response_ids": []}
        for row in _rows(files, (config.prompt_key, response_key)):
            prompt = _prompt_ids(row, tokenizer, config)
            response = [*tokenizer.encode(row.text(response_key)), tokenizer.eos_id]
            if len(prompt) > config.max_prompt_length or len(response) > config.max_response_length:
                if config.filter_overlong_prompts:
                    self.num_filtered += 1
                    continue
                prompt = _shorten(prompt, row, config)
                response = _shorten_response(response, row, config)
                self.num_truncated += 1
            columns["prompt_ids"].append(prompt)
            columns["response_ids"].append(response)
        _report(files, len(columns["prompt_ids"]), self.num_filtered, self.num_truncated)
        self._rows = _batch(columns, ragged=("prompt_ids", "response_ids"))

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        """The rows at `indices` [B]: prompt_ids and response_ids (jagged int64), index (int64 [B]). IndexError as
        `PromptDataset.batch`."""
        return _take(self._rows, indices)


class PreferenceDataset:
    """Pairs of answers to one prompt: rows {prompt: chat messages, chosen: string, rejected: string}, as ids that end
    with eos.

    Lengths are treated as by `SftDataset`, each answer as a response there.

    Args:
        files: parquet files, read in order.
        tokenizer: its chat template renders the prompts; answers are encoded as plain text.
        config: the `data` section.
        chosen_key, rejected_key: columns of the better and the worse answer.

    Raises:
        DataError: a file, column or row is missing or malformed, the two answers of a row are equal (also: after they
        were cut), or no
            row is left.
        ConfigError: `data.truncation` is unknown.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
    ) -> None:
        _check_truncation(config)
        keys, filtered, truncated = {"chosen_ids": chosen_key, "rejected_ids": rejected_key}, 0, 0
        columns: dict[str, list[Any]] = {"prompt_ids": [], **{name: [] for name in keys}}
        for row in _rows(files, (config.prompt_key, chosen_key, rejected_key)):
            ids = {name: [*tokenizer.encode(row.text(key)), tokenizer.eos_id] for name, key in keys.items()}
            ids["prompt_ids"] = _prompt_ids(row, tokenizer, config)
            if len(ids["prompt_ids"]) > config.max_prompt_length or any(
                len(ids[name]) > config.max_response_length for name in keys
            ):
                if config.filter_overlong_prompts:
                    filtered += 1
                    continue
                ids = {
                    name: (_shorten_response if name in keys else _shorten)(found, row, config)
                    for name, found in ids.items()
                }
                truncated += 1
            if ids["chosen_ids"] == ids["rejected_ids"]:
                raise DataError(
                    f"{row.path}, row {row.number}: columns {chosen_key!r} and {rejected_key!r} hold the same answer "
                    f"{row.text(chosen_key)[:60]!r}{' (after cutting it)' if truncated else ''}; a pair must differ: "
                    "remove the row"
                )
            for name, found in ids.items():
                columns[name].append(found)
        _report(files, len(columns["prompt_ids"]), filtered, truncated)
        self._rows = _batch(columns, ragged=tuple(columns))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def data_sources(self) -> list[str]:
        """None: no verifier scores recorded answers."""
        return []

    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        """The rows at `indices` [B]: prompt_ids, chosen_ids, rejected_ids (jagged int64), index (int64 [B]). IndexError
        as above."""
        return _take(self._rows, indices)


def _rows(files: Sequence[str | Path], required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    if not files:
        raise DataError(
            "no dataset files are given: set data.train_files, data.val_files or sft.train_files, or data.prepare.task"
        )
    for path in files:
        yield from read_rows(path, required, optional)


def _prompt_ids(row: Row, tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    messages = row.messages(config.prompt_key)
    try:
        ids = tokenizer.encode_chat(messages)
    except DataError as error:
        raise DataError(f"{row.path}, row {row.number}, column {config.prompt_key!r}: {error}") from error
    if not ids:
        raise row.malformed(config.prompt_key, "messages that render to at least one token")
    return ids


def _ground_truth(row: Row) -> Any:
    model = row.values["reward_model"]
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        raise row.malformed("reward_model", "a struct {style, ground_truth} with a ground_truth")
    return model["ground_truth"]


def _check_truncation(config: DataConfig) -> None:
    if config.truncation not in _TRUNCATIONS:
        raise ConfigError(f"data.truncation is {config.truncation!r}; choose one of {', '.join(_TRUNCATIONS)}")


def _shorten(ids: list[int], row: Row, config: DataConfig) -> list[int]:
    """At most `max_prompt_length` ids, cut where `data.truncation` says."""
    limit = config.max_prompt_length
    if len(ids) <= limit:
        return ids
    if config.truncation == "left":
        return ids[len(ids) - limit :]
    if config.truncation == "right":
        return ids[:limit]
    if config.truncation == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise _too_long(row, "the prompt", len(ids), "data.max_prompt_length", limit)


def _shorten_response(ids: list[int], row: Row, config: DataConfig) -> list[int]:
    limit = config.max_response_length
    if len(ids) > limit and config.truncation == "error":
        raise _too_long(row, "the response with its end token", len(ids), "data.max_response_length", limit)
    return ids[:limit]


def _too_long(row: Row, what: str, length: int, key: str, limit: int) -> DataError:
    return DataError(
        f"{row.path}, row {row.number}: {what} has {length} tokens, {key} is {limit}: raise it, set "
        "data.filter_overlong_prompts: true to drop such rows, or data.truncation to left, right or middle to cut them"
    )


def _report(files: Sequence[str | Path], kept: int, filtered: int, truncated: int) -> None:
    """Says how many rows are in use; raises DataError when none is."""
    named = ", ".join(map(str, files))
    if not kept:
        raise DataError(f"{named}: no rows left ({filtered} dropped as longer than the limits in the data section)")
    log.info("%s: %d rows, %d dropped as too long, %d cut", named, kept, filtered, truncated)


def _batch(columns: dict[str, list[Any]], ragged: Sequence[str]) -> DataProto:
    built: dict[str, Any] = {}
    for name, values in columns.items():
        if name in ragged:
            built[name] = Jagged.from_rows(values, np.int64)
            continue
        built[name] = objects(values)
    return DataProto.from_columns({**built, "index": np.arange(len(next(iter(columns.values()))), dtype=np.int64)})


def _take(rows: DataProto, indices: Sequence[int] | np.ndarray) -> DataProto:
    chosen = np.asarray(indices, dtype=np.int64)
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(rows)):
        raise IndexError(f"row {chosen.min() if chosen.min() < 0 else chosen.max()} of a dataset of {len(rows)} rows")
    return rows.rows(chosen)
