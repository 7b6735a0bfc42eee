"""Datasets in memory: parquet rows checked and tokenized once when the job starts, handed out as `DataProto`
batches."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.config.schema import DataConfig
from hybridflow.data.files import Row, read_rows
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError

log = logging.getLogger(__name__)


class _Dataset:
    """Rows of parquet files as token ids: a prompt, and the answers of `answers` {column: key of the row}, which end
    as the chat template ends them, once.

    A prompt whose last message is the assistant's is refused: the answer would stand in the question. With
    `data.continue_final_message` it is the beginning of the answer, and its turn stays open.

    A row with a prompt of more than `data.max_prompt_length` tokens (chat template included) or an answer of more than
    `data.max_response_length` (eos included) is dropped with `filter_overlong_prompts`, else refused or cut as
    `data.truncation` says: `left`, `middle` and `right` name the part of the prompt that is cut off. An answer is cut
    on the right, so that it does not end with eos.

    Attributes:
        num_filtered, num_truncated: overlong rows that were dropped, cut.
        places: of each row its file and its number there, as messages name them.

    Raises:
        DataError: a file, column or row is missing or malformed, a row is too long, or no row is left.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        answers: Mapping[str, str],
        others: Sequence[str] = (),
        optional: Sequence[str] = (),
        max_rows: int | None = None,
    ) -> None:
        self.num_filtered = self.num_truncated = 0
        self.places: list[str] = []
        columns: dict[str, list[Any]] = defaultdict(list)
        for row in _rows(files, (config.prompt_key, *answers.values(), *others), optional):
            if max_rows is not None and len(columns["prompt_ids"]) >= max_rows:
                break
            prompt = _prompt_ids(row, tokenizer, config)
            ids = {name: _answer_ids(row, key, tokenizer) for name, key in answers.items()}
            if len(prompt) > config.max_prompt_length or any(
                len(answer) > config.max_response_length for answer in ids.values()
            ):
                if config.filter_overlong_prompts:
                    self.num_filtered += 1
                    continue
                prompt = _shorten(prompt, row, config)
                ids = {name: _shorten_response(answer, row, config) for name, answer in ids.items()}
                self.num_truncated += 1
            for name, value in {"prompt_ids": prompt, **ids, **self._further(row, ids)}.items():
                columns[name].append(value)
            self.places.append(f"{row.path}, row {row.number}")
        _report(files, len(columns["prompt_ids"]), self.num_filtered, self.num_truncated)
        self._rows = _batch(columns, ragged=("prompt_ids", *answers))

    def _further(self, row: Row, answers: Mapping[str, list[int]]) -> dict[str, Any]:
        """Further columns of a row. DataError: it must not be used."""
        return {}

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        """The rows at `indices` [B], in that order; an index may repeat. Column `index` (int64 [B]) is the row of this
        dataset.

        Raises:
            IndexError: an index is negative or beyond the dataset.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(self)):
            wrong = chosen.min() if chosen.min() < 0 else chosen.max()
            raise IndexError(f"row {wrong} of a dataset of {len(self)} rows")
        return self._rows.rows(chosen)


class PromptDataset(_Dataset):
    """Prompts to sample responses for: prompt_ids (jagged int64), data_source, ground_truth, extra_info (objects).

    Required columns: `data.prompt_key` (chat messages or text), `data.data_source_key` (string; not with
    `data.data_source`), `data.ground_truth_key`. Optional: extra_info (struct).

    Args:
        files: parquet files, read in order.
        tokenizer: its chat template renders the prompts.
        config: the `data` section.
        max_rows: rows kept from the top, after filtering; None keeps all.
    """

    def __init__(
        self, files: Sequence[str | Path], tokenizer: Tokenizer, config: DataConfig, *, max_rows: int | None = None
    ) -> None:
        self._config = config
        sources = () if config.data_source is not None else (config.data_source_key,)
        columns = (*sources, config.ground_truth_key.partition(".")[0])
        super().__init__(files, tokenizer, config, {}, columns, ("extra_info",), max_rows)

    def _further(self, row: Row, answers: Mapping[str, list[int]]) -> dict[str, Any]:
        column, *path = self._config.ground_truth_key.split(".")
        truth = row.values[column]
        for name in path:
            truth = truth.get(name) if isinstance(truth, dict) else None
        if truth is None:
            inside = f"a struct with {self._config.ground_truth_key.partition('.')[2]}" if path else "a value"
            raise row.malformed(column, f"{inside}, by data.ground_truth_key={self._config.ground_truth_key}")
        source = self._config.data_source
        return {
            "data_source": row.text(self._config.data_source_key) if source is None else source,
            "ground_truth": truth,
            "extra_info": row.mapping("extra_info"),
        }

    @property
    def data_sources(self) -> list[str]:
        """The distinct data sources, sorted."""
        return sorted(set(self._rows["data_source"].tolist()))


class SftDataset(_Dataset):
    """Demonstrations, rows {prompt: chat messages, response: string}: prompt_ids and response_ids (jagged int64).

    Args:
        files: parquet files, read in order.
        tokenizer: its chat template renders the prompts; the response is encoded as plain text.
        config: the `data` section.
        response_key: column of the response (`sft.response_key`).
    """

    def __init__(
        self, files: Sequence[str | Path], tokenizer: Tokenizer, config: DataConfig, response_key: str = "response"
    ) -> None:
        super().__init__(files, tokenizer, config, {"response_ids": response_key})


class PreferenceDataset(_Dataset):
    """Pairs of answers to one prompt, rows {prompt: chat messages, chosen: string, rejected: string}: prompt_ids,
    chosen_ids and rejected_ids (jagged int64). A row whose answers are equal (also: after they were cut) is refused.

    Args:
        files: parquet files, read in order.
        tokenizer: its chat template renders the prompts; answers are encoded as plain text.
        config: the `data` section.
        chosen_key, rejected_key: columns of the better and the worse answer.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
    ) -> None:
        self._keys = (chosen_key, rejected_key)
        super().__init__(files, tokenizer, config, {"chosen_ids": chosen_key, "rejected_ids": rejected_key})

    def _further(self, row: Row, answers: Mapping[str, list[int]]) -> dict[str, Any]:
        if answers["chosen_ids"] == answers["rejected_ids"]:
            chosen, rejected = self._keys
            raise DataError(
                f"{row.path}, row {row.number}: columns {chosen!r} and {rejected!r} hold the same answer "
                f"{row.text(chosen)[:60]!r}{' (after cutting it)' if self.num_truncated else ''}; a pair must differ: "
                "remove the row"
            )
        return {}

    @property
    def data_sources(self) -> list[str]:
        """None: no verifier scores recorded answers."""
        return []


def _rows(files: Sequence[str | Path], required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    if not files:
        raise DataError(
            "no dataset files are given: set data.train_files, data.val_files or sft.train_files, or data.prepare.task"
        )
    for path in files:
        try:
            yield from read_rows(path, required, optional)
        except DataError as error:
            if "is missing; " not in str(error):
                raise
            raise DataError(
                f"{error}. Name the columns of these files in data.prompt_key, data.ground_truth_key and "
                "data.data_source_key (or data.data_source=NAME for all rows), or make files of a published set with "
                "`hybridflow prepare`"
            ) from error


def _answer_ids(row: Row, key: str, tokenizer: Tokenizer) -> list[int]:
    """The answer and the token that ends it. DataError: it says nothing."""
    ids = tokenizer.encode(row.text(key).rstrip())
    if not ids or ids[-1] not in tokenizer.stop_ids:
        ids = [*tokenizer.encode(row.text(key)), tokenizer.end_id]
    while len(ids) > 1 and ids[-2] in tokenizer.stop_ids:
        ids.pop()
    if len(ids) < 2:
        raise row.malformed(key, "an answer (an empty one would teach to end at once)")
    return ids


def _prompt_ids(row: Row, tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    text = row.values[config.prompt_key]
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else row.messages(config.prompt_key)
    if messages[-1]["role"] == "assistant" and not config.continue_final_message:
        raise DataError(
            f"{row.path}, row {row.number}, column {config.prompt_key!r}: the last message is the assistant's, "
            f"{messages[-1]['content'][:60]!r}; leave it out, or set data.continue_final_message: true where it is the "
            "beginning of the answer"
        )
    try:
        ids = tokenizer.encode_chat(messages)
    except DataError as error:
        raise DataError(f"{row.path}, row {row.number}, column {config.prompt_key!r}: {error}") from error
    if not ids:
        raise row.malformed(config.prompt_key, "messages that render to at least one token")
    return ids


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
