"""Encoders, which convert rows of data files to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.config.schema import DataConfig, SftConfig
from hybridflow.data.conversations import (
    LearnedRow,
    learned_rows,
    read_learned,
    read_messages,
    read_tools,
)
from hybridflow.data.files import Row
from hybridflow.data.images import ImageReader, images_of, with_parts
from hybridflow.data.packing import RESPONSE_MASK
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError

Ids = Mapping[str, list[int]]
_LIMITS = ("max_prompt_length", "max_response_length", "filter_overlong_prompts", "truncation")


@dataclass(frozen=True)
class Encoded:
    """The token rows (zero or more) encoded from one row of a file.

    Attributes:
        rows: token ids by column; empty if the row is dropped as too long.
        is_cut: True if anything was truncated.
    """

    rows: Sequence[Ids]
    is_cut: bool = False


class Encoder(Protocol):
    """The Encoder protocol: converts rows of data files to token ids."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the encoder uses."""
        ...

    @property
    def reads(self) -> Sequence[str]:
        """Names of the columns that every data file must have."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """Names of the token columns that the encoder produces."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect the tokens, apart from the tokenizer and the row."""
        ...

    def encode(self, row: Row) -> Encoded:
        """Encode a row. Raises DataError if it is malformed, or if it is too long and truncation is
        disabled."""
        ...


@dataclass(frozen=True)
class AnswerEncoder:
    """Encodes a prompt and its answers, each ending with one end token. `answers` maps token
    columns to row columns. `must_differ` rejects rows with equal answers, as needed for preference
    pairs."""

    tokenizer: Tokenizer
    config: DataConfig
    answers: Mapping[str, str]
    must_differ: bool = False
    images: ImageReader | None = None  # reads the column `data.image_key`

    @property
    def reads(self) -> Sequence[str]:
        """Names of the columns that every data file must have."""
        key = self.config.image_key
        images = () if self.images is None or key is None else (key,)
        return self.config.prompt_key, *self.answers.values(), *images

    @property
    def columns(self) -> Sequence[str]:
        """Names of the token columns that the encoder produces."""
        return "prompt_ids", *self.answers

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect the tokens, apart from the tokenizer and the row."""
        keys = ("prompt_key", "image_key", "continue_final_message", *_LIMITS)
        images = {} if self.images is None else {"images": self.images.settings}
        given = {key: getattr(self.config, key) for key in keys}
        return {"answers": dict(self.answers), **given, **images}

    def encode(self, row: Row) -> Encoded:
        """Encode a row. Raises DataError if it is malformed, or if it is too long and truncation is
        disabled."""
        config = self.config
        prompt = _prompt_ids(row, self.tokenizer, config, self.images)
        answers = {
            name: _answer_ids(row, key, self.tokenizer) for name, key in self.answers.items()
        }
        is_long = len(prompt) > config.max_prompt_length or any(
            len(answer) > config.max_response_length for answer in answers.values()
        )
        if is_long and config.filter_overlong_prompts:
            return Encoded([])
        if is_long:
            prompt = _shorten(prompt, row, config)
            answers = {
                name: _shorten_response(answer, row, config) for name, answer in answers.items()
            }
        if self.must_differ and len(set(map(tuple, answers.values()))) < len(answers):
            one, other = self.answers.values()
            raise DataError(
                f"{row.path}, row {row.number}: columns {one!r} and {other!r} contain the same "
                f"answer {row.text(one)[:60]!r}{' (after truncation)' if is_long else ''}; the "
                "answers of a pair must differ: remove the row"
            )
        return Encoded([{"prompt_ids": prompt, **answers}], is_long)


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes whole conversations. `response_ids` starts at the first token of the first learned
    turn, and `response_mask` marks the tokens of learned turns."""

    tokenizer: Tokenizer
    config: DataConfig
    sft: SftConfig
    columns: Sequence[str] = ("prompt_ids", "response_ids", RESPONSE_MASK)

    @property
    def reads(self) -> Sequence[str]:
        """Names of the columns that every data file must have."""
        keys = (self.sft.messages_key, self.sft.learned_key, self.sft.tools_key)
        return [key for key in keys if key is not None]

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect the tokens, apart from the tokenizer and the row."""
        found = {}
        for key in ("messages_key", "learned_key", "tools_key"):
            found[key] = getattr(self.sft, key)
        for key in _LIMITS:
            found[key] = getattr(self.config, key)
        return found

    def encode(self, row: Row) -> Encoded:
        """Encode a row. Raises DataError if it is malformed, or if it is too long and truncation is
        disabled."""
        key = self.sft.messages_key
        learned = self.sft.learned_key
        tools = self.sft.tools_key
        assert key is not None
        value = row.values[key]
        try:
            found = learned_rows(
                self.tokenizer,
                read_messages(value),
                read_learned(row.values[learned]) if learned is not None else None,
                read_tools(row.values[tools]) if tools is not None else None,
            )
        except DataError as error:
            where = f"{row.path}, row {row.number}, column {key!r}"
            raise DataError(f"{where}: {error}; found {str(value)[:120]}") from error
        limit = self.config.max_prompt_length + self.config.max_response_length
        longest = max(len(one.ids) for one in found)
        if (
            longest > limit
            and not self.config.filter_overlong_prompts
            and self.config.truncation == "error"
        ):
            keys = "data.max_prompt_length + data.max_response_length"
            raise _too_long(row, "the conversation", longest, keys, limit)
        kept = []
        for one in found:
            if len(one.ids) <= limit or not self.config.filter_overlong_prompts:
                kept.append(one)
        # truncated at the end, so that learned tokens keep their context
        rows = []
        for one in kept:
            if any(one.learned[:limit]):
                rows.append(_columns(one, limit))
        return Encoded(rows, longest > limit and bool(rows))


def _columns(row: LearnedRow, limit: int) -> Ids:
    begin = max(row.learned.index(True), 1)
    response = row.ids[begin:limit]
    mask = row.learned[begin:limit]
    return {
        "prompt_ids": row.ids[:begin],
        "response_ids": response,
        RESPONSE_MASK: list(map(int, mask)),
    }


def _answer_ids(row: Row, key: str, tokenizer: Tokenizer) -> list[int]:
    """Encode an answer with its end token. Raises DataError if it is empty."""
    ids = tokenizer.encode(row.text(key).rstrip())
    if not ids or ids[-1] not in tokenizer.stop_ids:
        ids = [*tokenizer.encode(row.text(key)), tokenizer.end_id]
    while len(ids) > 1 and ids[-2] in tokenizer.stop_ids:
        ids.pop()
    if len(ids) < 2:
        raise row.malformed(
            key, "a non-empty answer (an empty one would teach the model to stop immediately)"
        )
    return ids


def _prompt_ids(
    row: Row, tokenizer: Tokenizer, config: DataConfig, images: ImageReader | None
) -> list[int]:
    text = row.values[config.prompt_key]
    messages = (
        [{"role": "user", "content": text}]
        if isinstance(text, str)
        else row.messages(config.prompt_key, parts=images is not None)
    )
    if messages[-1]["role"] == "assistant" and not config.continue_final_message:
        raise DataError(
            f"{row.path}, row {row.number}, column {config.prompt_key!r}: the last message is from "
            f"the assistant ({messages[-1]['content'][:60]!r}); remove it, or set "
            "data.continue_final_message=true if it is the beginning of the answer"
        )
    try:
        if images is None or config.image_key is None:
            ids = tokenizer.encode_chat(messages)
        else:
            ids = tokenizer.encode_chat(with_parts(messages))
            ids = images.expanded(ids, images_of(row, config.image_key))
    except DataError as error:
        raise DataError(
            f"{row.path}, row {row.number}, column {config.prompt_key!r}: {error}"
        ) from error
    if not ids:
        raise row.malformed(config.prompt_key, "messages that render to at least one token")
    return ids


def _shorten(ids: list[int], row: Row, config: DataConfig) -> list[int]:
    """Truncate the prompt to `max_prompt_length` ids according to `data.truncation`."""
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
        raise _too_long(
            row, "the response with its end token", len(ids), "data.max_response_length", limit
        )
    return ids[:limit]


def _too_long(row: Row, what: str, length: int, key: str, limit: int) -> DataError:
    return DataError(
        f"{row.path}, row {row.number}: {what} has {length} tokens, but {key} is {limit}; raise "
        "it, set data.filter_overlong_prompts=true to drop such rows, or set data.truncation to "
        "left, right or middle to truncate them"
    )
