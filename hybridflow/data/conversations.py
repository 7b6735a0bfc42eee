"""Conversion of whole conversations to training rows: token ids, and a mask of the assistant's
tokens.

As in generation, the learned tokens of an answer start right after its generation prompt and
include its end token. A template may render an answer differently once messages follow it (without
its thinking, or with another end token). Such an answer is learned in a separate row that ends with
it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybridflow.data.chat_template import common_beginning
from hybridflow.data.plain_text import whole_text
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError

Messages = Sequence[Mapping[str, Any]]
_THINKING = re.compile(r"</?think>")
_FORM = (
    "a list of chat messages {role: string, content: string, ...} (an answer with tool_calls may "
    "omit content)"
)


@dataclass(frozen=True)
class LearnedRow:
    """A conversation, or a prefix of one, as tokens.

    Attributes:
        ids: the rendered conversation, plus the end token if the template does not write one.
        learned: True for tokens of the assistant's learned turns.
    """

    ids: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class _Turn:
    """An answer and the conversation up to it.

    Attributes:
        text: the rendered conversation.
        begin, end: span of the answer, including the token that closes it.
        is_closed: True if there is such a token. If False, the header of the next message may close
            the answer.
    """

    text: str
    begin: int
    end: int
    is_closed: bool


def learned_rows(
    tokenizer: Tokenizer, messages: Messages, wanted: Sequence[bool] | None, tools: Messages | None
) -> list[LearnedRow]:
    """Convert a conversation to training rows in which each of the assistant's turns is learned
    exactly once.

    Args:
        tokenizer: its chat template renders the conversation.
        messages: the conversation, in the format returned by `read_messages`.
        wanted: one boolean per assistant message, True to learn it; None learns all.
        tools: tool declarations for the template; None uses the run's tools.

    Raises:
        DataError: no turn is learned, or the template rejects the messages or renders an answer
            without its generation prompt.
    """
    places = []
    for place, one in enumerate(messages):
        if one["role"] == "assistant":
            places.append(place)
    if wanted is not None and len(wanted) != len(places):
        raise DataError(
            f"expected one boolean for each of the {len(places)} assistant messages, got "
            f"{len(wanted)}"
        )
    learned = []
    for place, is_wanted in zip(places, wanted or [True] * len(places), strict=True):
        if is_wanted:
            learned.append(place)
    if not learned:
        raise DataError("there is no assistant message to train on; remove the row")
    problem: DataError | None = None
    # some templates require call arguments as objects, others as text
    has_calls = any("tool_calls" in one for one in messages)
    for form in (json.loads, json.dumps) if has_calls else (json.loads,):
        shown = [_with_arguments(one, form) for one in messages]
        try:
            return _rows(tokenizer, [_turn(tokenizer, shown, place, tools) for place in learned])
        except DataError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Validate a cell of the conversation column. Fields that Arrow filled with null are dropped.

    Raises:
        DataError: the value is not a conversation.
    """
    messages = _plain(value, _FORM)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"expected {_FORM}")
    for one in messages:
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise DataError(f"expected {_FORM}")
        if one["role"] == "assistant" and one.get("tool_calls"):
            one.setdefault("content", "")
        if not isinstance(one.get("content"), str):
            raise DataError(f"expected {_FORM}")
    return messages


def read_learned(value: Any) -> list[bool]:
    """Validate a cell of the column that marks learned turns.

    Raises:
        DataError: the value is not a list of booleans or of 0 and 1.
    """
    if not isinstance(value, list | tuple) or not all(one in (0, 1) for one in value):
        raise DataError("expected a list of booleans, one for each assistant message")
    return list(map(bool, value))


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Validate a value of the tools column: a list of tool declarations, or a JSON string of such a
    list. Returns None if it is empty.

    Raises:
        DataError: the value is neither declarations nor JSON.
    """
    tools = _plain(value or None, "a list of tool declarations, or its JSON")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise DataError("expected a list of tool declarations, or its JSON")
    return tools


def _turn(tokenizer: Tokenizer, messages: Messages, place: int, tools: Messages | None) -> _Turn:
    """Render the answer at index `place`. Raises DataError if the template omits it or does not
    render it directly after its generation prompt."""
    prompt = whole_text(tokenizer.render(messages[:place], True, tools))
    text = whole_text(tokenizer.render(messages[: place + 1], False, tools))
    if not text.startswith(prompt):
        alike = max(len(common_beginning(prompt, text)) - 20, 0)
        raise DataError(
            f"message {place}: the chat template's generation prompt ends with "
            f"{prompt[alike:][:60]!r}, but it renders this answer after {text[alike:][:60]!r}, so "
            "training would not match generation. Put its thinking into reasoning_content, set "
            "data.chat_template_kwargs, exclude the turn with sft.learned_key, or use a template "
            "that renders both identically (chat_template.jinja in model.tokenizer)"
        )
    template = tokenizer.template
    begin = len(prompt)
    end = len(text)
    ends = None
    closes = template.closes_answer
    if closes and text.endswith(closes):
        end -= len(closes)
        ends = next(template.stops_in(text, end), None)
    else:  # calls may be closed differently from text
        last = next(reversed(list(template.stops_in(text, begin))), None)
        ends = last if last is not None and not text[last.end :].strip() else None
    _check_shown(messages[place], place, text[begin : min(end, ends.begin if ends else end)])
    return _Turn(text, begin, ends.end, True) if ends else _Turn(text[:end], begin, end, False)


def _check_shown(message: Mapping[str, Any], place: int, shown: str) -> None:
    """Reject an answer that the template renders only partially, because the rest would not be
    learned."""
    said = []
    for key in ("reasoning_content", "content"):
        said.extend(_THINKING.split(message.get(key) or ""))
    calls = []
    for call in message.get("tool_calls") or ():
        calls.append(str(call["function"].get("name", "")))
    if not shown.strip():
        raise DataError(
            f"message {place}: the chat template does not show this answer; is it empty?"
        )
    if missing := [part for part in (*said, *calls) if whole_text(part).strip() not in shown]:
        raise DataError(
            f"message {place}: the chat template omits {missing[0].strip()[:60]!r} from this "
            "answer; remove it from the data too, or use a template that shows it "
            "(chat_template.jinja in model.tokenizer)"
        )


def _rows(tokenizer: Tokenizer, answers: Sequence[_Turn]) -> list[LearnedRow]:
    """Build the training rows, beginning with the longest conversation, because it may contain
    earlier turns unchanged."""
    rows: list[tuple[str, list[tuple[int, int]]]] = []
    for turn in reversed(answers):
        for text, spans in rows:
            if (end := _end_in(text, turn, tokenizer)) is not None:
                spans.append((turn.begin, end))
                break
        else:
            rows.append((turn.text, [(turn.begin, turn.end)]))
    is_closed = {turn.text: turn.is_closed for turn in answers}
    return [_row(tokenizer, text, spans, is_closed[text]) for text, spans in reversed(rows)]


def _end_in(text: str, turn: _Turn, tokenizer: Tokenizer) -> int | None:
    """Return the position at which the turn ends in a longer conversation, or None if that
    conversation renders it differently or does not close it."""
    if not text.startswith(turn.text[: turn.end]):
        return None
    if turn.is_closed:
        return turn.end
    after = next(tokenizer.template.stops_in(text, turn.end), None)
    return after.end if after is not None and not text[turn.end : after.begin].strip() else None


def _row(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]], is_closed: bool
) -> LearnedRow:
    """Tokenize a text. Tokens that start inside a span are learned."""
    ids, begins = tokenizer.encode_with_places(text)
    learned = []
    for place in begins:
        learned.append(any(begin <= place < end for begin, end in spans))
    if not is_closed:
        ids = [*ids, tokenizer.end_id]
        learned = [*learned, True]
    return LearnedRow(ids, learned)


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """Convert the arguments of the message's tool calls to objects (`json.loads`) or to text
    (`json.dumps`)."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if isinstance(given := function.get("arguments", {}), str) == (form is json.loads):
            with suppress(ValueError):  # invalid JSON stays as the model wrote it
                function["arguments"] = form(given)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _plain(value: Any, expected: str) -> Any:
    """Parse the value if it is JSON text, and remove nulls."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"expected {expected}; found invalid JSON ({error})") from error
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {}
        for key, one in value.items():
            if one is not None:
                kept[key] = _without_nulls(one)
        return kept
    return list(map(_without_nulls, value)) if isinstance(value, list | tuple) else value
