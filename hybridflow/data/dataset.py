"""In-memory datasets: rows are validated and tokenized once at the start of a job, and returned as
`DataProto` batches."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, objects
from hybridflow.config.schema import DataConfig, SftConfig
from hybridflow.data.encoding import AnswerEncoder, ConversationEncoder, Encoder
from hybridflow.data.files import Row, read_rows
from hybridflow.data.images import COLUMN, images_of, reader_of
from hybridflow.data.token_cache import TokenCache
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.data.tokenizing import CUT, Piece, known_pieces, pieces
from hybridflow.errors import DataError

log = logging.getLogger(__name__)
_PAIRS = SftConfig()


class _Dataset:
    """Tokenized rows of data files: a prompt and its answers, each ending with one end token of the
    chat template.

    A prompt that ends with an assistant message is rejected, because the answer would be part of
    the question. With `data.continue_final_message`, that message is the beginning of the answer,
    and its turn stays open.

    A row whose prompt exceeds `data.max_prompt_length` tokens (chat template included), or whose
    answer exceeds `data.max_response_length` (eos included), is dropped with
    `filter_overlong_prompts`, else handled by `data.truncation`: `left`, `middle` and `right` name
    the part of the prompt to remove, and `error` raises. An answer is truncated on the right and
    then has no eos. A conversation may have as many tokens as both limits combined; a longer one is
    truncated on the right.

    If there are many rows, several processes encode them. The tokens of large files are cached for
    later runs (`TokenCache`).

    Args:
        files: data files, read in order.
        encoder: tokenizes the rows.
        config: the `data` section.
        others, optional: names of additional columns; files must have those in `others` and may
            have those in `optional`.
        max_rows: keep only the first `max_rows` rows after filtering; None keeps all.

    Attributes:
        num_filtered, num_truncated: how many overlong rows were dropped and truncated,
            respectively.
        places: file and row number of each row, for error messages.

    Raises:
        DataError: a file, column or row is missing or malformed, a row is too long, or no rows are
            left.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        encoder: Encoder,
        config: DataConfig,
        others: Sequence[str] = (),
        optional: Sequence[str] = (),
        max_rows: int | None = None,
    ) -> None:
        self.num_filtered = self.num_truncated = 0
        reads_images = getattr(encoder, "images", None) is not None
        self._image_key = config.image_key if reads_images else None
        self.places: list[str] = []
        self._columns: dict[str, list[Any]] = defaultdict(list)
        cache = TokenCache.of(files, encoder, max_rows) if config.cache_tokens else TokenCache(None)
        kept = cache.read()
        rows = _rows(files, (*encoder.reads, *others), optional)
        taken: list[DataProto] = []
        with closing(pieces(rows, encoder) if kept is None else known_pieces(rows, kept)) as found:
            for piece in found:
                taken.append(self._take(piece, max_rows))
                if max_rows is not None and len(self.places) >= max_rows:
                    break
                if piece.problem is not None:
                    raise DataError(piece.problem)
        _report(
            files, len(self.places), self.num_filtered, self.num_truncated, len(set(self.places))
        )
        tokens = DataProto.concat(taken)
        if kept is None:
            cache.write(tokens)
        built = {name: tokens[name] for name in encoder.columns}
        built |= {name: objects(values) for name, values in self._columns.items()}
        self._rows = DataProto.from_columns(
            {**built, "index": np.arange(len(self.places), dtype=np.int64)}
        )

    def _take(self, piece: Piece, max_rows: int | None) -> DataProto:
        """Add the rows of a piece until there are `max_rows` in total. Returns the tokens of the
        added rows."""
        counts = piece.counts()
        taken = 0
        for row, count in zip(piece.rows, counts.tolist(), strict=True):
            if max_rows is not None and len(self.places) >= max_rows:
                break
            self.num_filtered += not count
            for name, value in self._further(row).items() if count else ():
                self._columns[name] += [value] * count
            self.places += [f"{row.path}, row {row.number}"] * count
            taken += count
        tokens = piece.tokens.rows(slice(0, taken))
        self.num_truncated += int(tokens.dense(CUT).sum())
        return tokens

    def _further(self, row: Row) -> dict[str, Any]:
        """Return the values of a row's additional columns. Raises DataError if the row is
        unusable."""
        return {COLUMN: images_of(row, self._image_key)} if self._image_key is not None else {}

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        """Return the rows at `indices` [B], in that order; an index may repeat. Column `index`
        (int64 [B]) is the row number in this dataset.

        Raises:
            IndexError: an index is negative or beyond the end.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(self)):
            wrong = chosen.min() if chosen.min() < 0 else chosen.max()
            raise IndexError(f"row {wrong} is out of range for a dataset of {len(self)} rows")
        return self._rows.rows(chosen)


class PromptDataset(_Dataset):
    """A dataset of prompts for sampling responses. Columns: prompt_ids (jagged int64), data_source,
    ground_truth, extra_info (objects); with `data.keep_prompts` also prompt (objects: the row's
    messages); with `data.image_key` also images (objects: encoded images, see
    `images.with_pixels`).

    Required columns: `data.prompt_key` (chat messages or text), `data.data_source_key` (string; not
    needed if `data.data_source` is set), `data.ground_truth_key`. Optional: extra_info (struct).

    Args:
        files: parquet files, read in order.
        tokenizer: its chat template renders the prompts.
        config: the `data` section.
        max_rows: keep only the first `max_rows` rows after filtering; None keeps all.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        max_rows: int | None = None,
    ) -> None:
        self._config = config
        self.images = reader_of(tokenizer, config)
        sources = () if config.data_source is not None else (config.data_source_key,)
        columns = (*sources, config.ground_truth_key.partition(".")[0])
        super().__init__(
            files,
            AnswerEncoder(tokenizer, config, {}, images=self.images),
            config,
            columns,
            ("extra_info",),
            max_rows,
        )

    def _further(self, row: Row) -> dict[str, Any]:
        column, *path = self._config.ground_truth_key.split(".")
        truth = row.values[column]
        for name in path:
            truth = truth.get(name) if isinstance(truth, dict) else None
        if truth is None:
            inside = (
                f"a struct with {self._config.ground_truth_key.partition('.')[2]}"
                if path
                else "a value"
            )
            raise row.malformed(
                column, f"{inside}, by data.ground_truth_key={self._config.ground_truth_key}"
            )
        source = self._config.data_source
        return (
            super()._further(row)
            | self._prompt(row)
            | {
                "data_source": row.text(self._config.data_source_key) if source is None else source,
                "ground_truth": truth,
                "extra_info": row.mapping("extra_info"),
            }
        )

    def _prompt(self, row: Row) -> dict[str, Any]:
        key = self._config.prompt_key
        if not self._config.keep_prompts:
            return {}
        text = row.values[key]
        is_text = isinstance(text, str)
        if is_text:
            return {"prompt": [{"role": "user", "content": text}]}
        return {"prompt": row.messages(key, parts=self._config.image_key is not None)}

    @property
    def data_sources(self) -> list[str]:
        """The distinct data sources of all rows, sorted."""
        return sorted(set(self._rows["data_source"].tolist()))


class SftDataset(_Dataset):
    """Demonstrations. Columns:

    prompt_ids and response_ids (jagged int64). Input rows are {prompt: chat messages, response:
    string}. With `sft.messages_key` they are conversations, and `response_mask` (jagged bool) marks
    the learned tokens.

    Args:
        files: data files, read in order.
        tokenizer: its chat template renders the prompts; a response is encoded as plain text.
        config: the `data` section.
        sft: the section that names the columns.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        sft: SftConfig = _PAIRS,
    ) -> None:
        self.images = reader_of(tokenizer, config)
        answers = {"response_ids": sft.response_key}
        encoder: Encoder = AnswerEncoder(tokenizer, config, answers, images=self.images)
        if sft.messages_key is not None:
            encoder = ConversationEncoder(tokenizer, config, sft)
        super().__init__(files, encoder, config)


class PreferenceDataset(_Dataset):
    """Preference pairs. Columns:

    prompt_ids, chosen_ids and rejected_ids (jagged int64). Input rows are {prompt: chat messages,
    chosen: string, rejected: string}. A row is rejected if its answers are equal, before or after
    truncation.

    Args:
        files: parquet files, read in order.
        tokenizer: its chat template renders the prompts; answers are encoded as plain text.
        config: the `data` section.
        chosen_key, rejected_key: names of the columns that contain the better and the worse answer.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
    ) -> None:
        answers = {"chosen_ids": chosen_key, "rejected_ids": rejected_key}
        super().__init__(files, AnswerEncoder(tokenizer, config, answers, must_differ=True), config)

    @property
    def data_sources(self) -> list[str]:
        """Always empty, because recorded answers are not scored by verifiers."""
        return []


def _rows(
    files: Sequence[str | Path], required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[Row]:
    if not files:
        raise DataError(
            "no dataset files; set data.train_files, data.val_files or sft.train_files, or "
            "data.prepare.task"
        )
    for path in files:
        try:
            yield from read_rows(path, required, optional)
        except DataError as error:
            if "is missing; " not in str(error):
                raise
            raise DataError(
                f"{error}. Set the column names in data.prompt_key, data.ground_truth_key and "
                "data.data_source_key (or data.data_source=NAME for all rows), or, for "
                "demonstrations, in sft.response_key or sft.messages_key; or convert a published "
                "dataset with `hybridflow prepare`"
            ) from error


def _report(
    files: Sequence[str | Path], kept: int, filtered: int, truncated: int, sources: int
) -> None:
    """Log the number of rows used and dropped. Raises DataError if no rows are left."""
    named = ", ".join(map(str, files))
    if not kept:
        raise DataError(
            f"{named}: no rows left ({filtered} dropped because they exceed the length limits in "
            "the data section)"
        )
    log.info("%s: %d rows, %d dropped as too long, %d truncated", named, kept, filtered, truncated)
    if kept > sources:
        log.info(
            "%s: split %d conversations into %d rows, because the chat template renders an answer "
            "differently once messages follow it",
            named,
            sources,
            kept,
        )
