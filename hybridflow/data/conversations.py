"""Whole conversations as rows to learn from: which tokens the assistant wrote, as the chat template
shows them.

An answer is learned behind the tokens that ask for it, and with the token that ends it, as
generation has both. A template may write an answer otherwise once messages follow it (without its
thinking, with another end). Such an answer is learned in a row of its own, which is the
conversation up to it.
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
    "a list of chat messages {role: string, content: string, ...}, where an answer with tool_calls "
    "may be without content"
)


@dataclass(frozen=True)
class LearnedRow:
    """A conversation, or the beginning of one, as tokens.

    Attributes:
        ids: what the chat template makes of it, and the token that ends its last answer where the
            template has none.
        learned: which of them the assistant wrote in turns that are learned.
    """

    ids: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class _Turn:
    """An answer in the conversation up to it.

    Attributes:
        text: of that conversation.
        begin, end: where the answer begins in it, and where it has ended, with the token that
            closes it.
        is_closed: whether there is such a token; otherwise the mark of the next message may be it.
    """

    text: str
    begin: int
    end: int
    is_closed: bool


def learned_rows(
    tokenizer: Tokenizer, messages: Messages, wanted: Sequence[bool] | None, tools: Messages | None
) -> list[LearnedRow]:
    """The rows in which the assistant's turns of a conversation are learned, each turn in one of
    them.

    Args:
        tokenizer: its chat template shows the conversation.
        messages: as `read_messages` returns them.
        wanted: for each message of the role assistant whether it is learned; None: all are.
        tools: declarations that the template shows; None: those of the run.

    Raises:
        DataError: no turn is learned, or the template refuses the messages or shows an answer
            otherwise than behind the prompt that asks for it.
    """
    places = []
    for place, one in enumerate(messages):
        if one["role"] == "assistant":
            places.append(place)
    if wanted is not None and len(wanted) != len(places):
        raise DataError(
            f"{len(wanted)} marks for {len(places)} messages of the assistant; give one for each"
        )
    learned = []
    for place, is_wanted in zip(places, wanted or [True] * len(places), strict=True):
        if is_wanted:
            learned.append(place)
    if not learned:
        raise DataError("there is no message of the assistant to learn; remove the row")
    problem: DataError | None = None
    # some templates want the arguments of calls as objects, others as text
    for form in (
        (json.loads, json.dumps) if any("tool_calls" in one for one in messages) else (json.loads,)
    ):
        shown = [_with_arguments(one, form) for one in messages]
        try:
            return _rows(tokenizer, [_turn(tokenizer, shown, place, tools) for place in learned])
        except DataError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def read_messages(value: Any) -> list[dict[str, Any]]:
    """A value of a column of conversations, without the fields that Arrow filled with null.

    Raises:
        DataError: it is none.
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
    """A value of a column that says which turns are learned.

    Raises:
        DataError: it is no list of booleans, or of 0 and 1.
    """
    if not isinstance(value, list | tuple) or not all(one in (0, 1) for one in value):
        raise DataError("expected a list of booleans, one for each message of the assistant")
    return list(map(bool, value))


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """A value of a column of tools: declarations or their JSON; None where there are none.

    Raises:
        DataError: it is neither.
    """
    tools = _plain(value or None, "a list of declarations of tools, or its JSON")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise DataError("expected a list of declarations of tools, or its JSON")
    return tools


def _turn(tokenizer: Tokenizer, messages: Messages, place: int, tools: Messages | None) -> _Turn:
    """The answer at `place`. DataError: it does not follow the prompt that asks for it, or is not
    shown."""
    prompt = whole_text(tokenizer.render(messages[:place], True, tools))
    text = whole_text(tokenizer.render(messages[: place + 1], False, tools))
    if not text.startswith(prompt):
        alike = max(len(common_beginning(prompt, text)) - 20, 0)
        raise DataError(
            f"message {place}: the chat template asks for this answer with {prompt[alike:][:60]!r} "
            f"and shows it behind {text[alike:][:60]!r}, so that it would be learned where "
            "generation never is. Give its thinking in reasoning_content, set "
            "data.chat_template_kwargs, leave the turn out with sft.learned_key, or use a template "
            "that shows both alike (chat_template.jinja in model.tokenizer)"
        )
    template = tokenizer.template
    begin = len(prompt)
    end = len(text)
    ends = None
    closes = template.closes_answer
    if closes and text.endswith(closes):
        end -= len(closes)
        ends = next(template.stops_in(text, end), None)
    else:  # calls may be closed in another way than text
        last = next(reversed(list(template.stops_in(text, begin))), None)
        ends = last if last is not None and not text[last.end :].strip() else None
    _check_shown(messages[place], place, text[begin : min(end, ends.begin if ends else end)])
    return _Turn(text, begin, ends.end, True) if ends else _Turn(text[:end], begin, end, False)


def _check_shown(message: Mapping[str, Any], place: int, shown: str) -> None:
    """Refuse an answer of which a template leaves something out: less would be learned than was
    said."""
    said = []
    for key in ("reasoning_content", "content"):
        said.extend(_THINKING.split(message.get(key) or ""))
    calls = []
    for call in message.get("tool_calls") or ():
        calls.append(str(call["function"].get("name", "")))
    if not shown.strip():
        raise DataError(
            f"message {place}: the chat template shows nothing of this answer; is it empty?"
        )
    if missing := [part for part in (*said, *calls) if whole_text(part).strip() not in shown]:
        raise DataError(
            f"message {place}: the chat template leaves {missing[0].strip()[:60]!r} of this answer "
            "out; leave it out of the data too, or use a template that shows it "
            "(chat_template.jinja in model.tokenizer)"
        )


def _rows(tokenizer: Tokenizer, answers: Sequence[_Turn]) -> list[LearnedRow]:
    """The longest conversations first, as each may hold earlier turns as they are."""
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
    """Where the turn has ended in a longer conversation; None where that shows it otherwise, or
    does not end it."""
    if not text.startswith(turn.text[: turn.end]):
        return None
    if turn.is_closed:
        return turn.end
    after = next(tokenizer.template.stops_in(text, turn.end), None)
    return after.end if after is not None and not text[turn.end : after.begin].strip() else None


def _row(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]], is_closed: bool
) -> LearnedRow:
    """The tokens of a text; those that begin inside of a span are learned."""
    ids, begins = tokenizer.encode_with_places(text)
    learned = []
    for place in begins:
        learned.append(any(begin <= place < end for begin, end in spans))
    if not is_closed:
        ids = [*ids, tokenizer.end_id]
        learned = [*learned, True]
    return LearnedRow(ids, learned)


def _with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as objects (`json.loads`) or as text
    (`json.dumps`)."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if isinstance(given := function.get("arguments", {}), str) == (form is json.loads):
            with suppress(ValueError):  # text that is no JSON stays what the model wrote
                function["arguments"] = form(given)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _plain(value: Any, expected: str) -> Any:
    """The value, or what its JSON says, without nulls."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"expected {expected}; found text that is no JSON ({error})") from error
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {}
        for key, one in value.items():
            if one is not None:
                kept[key] = _without_nulls(one)
        return kept
    return list(map(_without_nulls, value)) if isinstance(value, list | tuple) else value
