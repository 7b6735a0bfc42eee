"""The text that a chat template writes between one answer and the next, derived by rendering short
placeholder conversations.

A template is a program, so its output is inspected rather than its source. The placeholders reveal
where turns open and close and how an observation is written (unchanged, trimmed, as JSON), so a
conversation can be continued without re-rendering it from the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from hybridflow.data.added_tokens import AddedTokens, Found
from hybridflow.errors import DataError
from hybridflow.rewards.reading import opens_thinking

Message = Mapping[str, Any]
# (messages, whether to open the next answer) -> the rendered text; raises DataError if the template
# rejects the messages
Render = Callable[[Sequence[Message], bool], str]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_OPENING: Message = {"role": "user", "content": "?"}
_SAMPLE = ' say "hi"\n\\ '
_MOST_FRAMES = 128  # texts of placeholder conversations that are kept
_MARK = re.compile(r"kQzV([A-Z])([0-9]{4})")


def _mark(kind: str, number: int = 0) -> str:
    """Return a placeholder of nine letters and digits, because some templates accept only this form
    as a call id."""
    return f"kQzV{kind}{number:04d}"


_ANSWER = _mark("A")
_THOUGHT = _mark("H")


@dataclass(frozen=True)
class Piece:
    """A part of a prompt.

    Attributes:
        is_literal: the text is untrusted, so special tokens spelled out in it are encoded as plain
            text.
    """

    text: str
    is_literal: bool = False


@dataclass(frozen=True)
class ShownCall:
    """A tool call in an answer. Its result message refers to it by this name and id."""

    name: str
    id: str


@dataclass(frozen=True)
class Exchange:
    """An answer and the messages that follow it.

    Attributes:
        messages: role and content; tool results also have `tool_call_id` and `name` if known.
        calls: the answer's tool calls.
    """

    messages: Sequence[Message]
    calls: Sequence[ShownCall] = ()


@dataclass(frozen=True)
class ObservationForm:
    """How a template renders a message of one role after an answer.

    Attributes:
        before, after: the text around the content; `before` includes the end of the answer.
        text: how the content is written: `raw`, `trimmed`, `json` (the inside of a JSON string) or
            `other`.
    """

    before: str
    after: str
    text: str


@dataclass(frozen=True)
class TemplateReport:
    """A description of how a chat template renders turns.

    Attributes:
        closes_answer: the text that follows an answer at the end of the conversation; empty if an
            answer is closed by the header of the next role.
        ends_answer: the token in `closes_answer` that ends an answer; None if there is none.
        stop_tokens: tokens that stop generation.
        roles: roles that the template accepts.
        observations: how a message after an answer is rendered, keyed by role (`tool`, `user`).
            Contains no role whose messages the template cannot render exactly after an answer;
            these are listed in `problems`.
        problems: why a role's messages cannot follow an answer, keyed by role.
        needs_calls: `tool` messages are accepted only after an answer with tool calls.
        opens_thinking: the generation prompt ends inside a thinking block.
        drops_thinking: roles whose messages make the template drop the thinking of earlier answers.
        example_call: an answer that calls the tool `lookup` with {"key": "value"}; empty if the
            template writes no calls.
    """

    closes_answer: str
    ends_answer: str | None
    stop_tokens: tuple[str, ...]
    roles: tuple[str, ...]
    observations: Mapping[str, ObservationForm]
    problems: Mapping[str, str]
    needs_calls: bool
    opens_thinking: bool
    drops_thinking: tuple[str, ...]
    example_call: str


class _NoEndError(DataError):
    """The template renders an answer's tool calls, but no stop token after them."""


@dataclass(frozen=True)
class _Frame:
    """A rendered conversation with placeholder contents.

    Attributes:
        text: the whole conversation.
        answer: position right after the first placeholder in the last answer.
        begin: position at which the last answer ends.
        messages: all messages of the conversation.
        contents: the real contents of the messages after the last answer.
        names: the real names and ids, keyed by placeholder.
    """

    text: str
    answer: int
    begin: int
    messages: Sequence[Message]
    contents: Sequence[str]
    names: Mapping[str, str]


@dataclass(frozen=True)
class _Form:
    """A way to pass an answer's tool calls to a template.

    Attributes:
        most_calls: maximum calls per answer; None for all.
        as_text: arguments are JSON text rather than an object.
        invents: add placeholder tool calls to an answer that has none but is followed by tool
            results.
    """

    most_calls: int | None
    as_text: bool
    invents: bool


class ChatTemplate:
    """Continues conversations in the format of a chat template.

    Args:
        name: name of the tokenizer, for errors.
        render: renders messages with the template and the run's tools.
        added: the tokenizer's added tokens.
        stops: tokens that stop generation.
    """

    def __init__(self, name: str, render: Render, added: AddedTokens, stops: Sequence[str]) -> None:
        self._name = name
        self._render = render
        self._added = added
        self._stops = tuple(stops)
        # placeholder conversations repeat: only the contents of real ones differ
        self._rendered = lru_cache(_MOST_FRAMES)(self._render_frame)

    def following(self, exchanges: Sequence[Exchange], last: str | None = None) -> list[Piece]:
        """Return the text between the last answer and the next one.

        Args:
            exchanges: all exchanges after the first user message. Only the messages of the last
                exchange are rendered; for earlier exchanges, only roles, tool calls and ids are
                used.
            last: text of the stop token that ended the answer; None if something else ended it. If
                the template writes the same end token, that token is omitted, because it was
                already sampled.

        Raises:
            DataError: the template rejects the messages, or does not show them and the answer
                exactly once, in order.
        """
        frame = self._frame(exchanges)
        shown = self._shown(frame)
        skipped = self._sampled(frame.text[frame.begin :], last)
        if shown is None:
            return [Piece(self._whole(frame)[skipped:])]
        pieces: list[Piece] = []
        place = frame.begin + skipped
        for found in _MARK.finditer(frame.text, place):
            pieces += [
                Piece(frame.text[place : found.start()]),
                Piece({**frame.names, **shown}[found[0]], True),
            ]
            place = found.end()
        kept: list[Piece] = []
        for piece in (*pieces, Piece(frame.text[place:])):
            if piece.text:
                kept.append(piece)
        return kept

    def check(self, role: str, *, with_calls: bool = False) -> None:
        """Reject a template that cannot continue a conversation with messages from this role.

        Args:
            with_calls: the answers have tool calls.

        Raises:
            DataError: the template rejects the messages, does not show them exactly once, or
                renders earlier messages differently after them.
        """
        once, twice = (
            self._frame([_example(role, "?", with_calls)] * count).text for count in (1, 2)
        )
        said = once.partition(_mark("T"))[0]
        for last, earlier in ((_ANSWER, _mark("E", 1)), (_mark("V"), _mark("U"))):
            said = said.replace(last, earlier)
        if not twice.startswith(said):
            raise DataError(
                f"{self._name}: the chat template changes earlier messages when a message with "
                f"role {role} follows, so the tokens of a conversation would change; use another "
                "rollout.agent.observation_role, or a template that leaves earlier messages "
                "unchanged"
            )

    def stops_in(self, text: str, begin: int = 0) -> Iterator[Found]:
        """Yield the stop tokens in the text in order, starting at offset `begin`."""
        return (found for found in self._added.find(text, begin) if found.token in self._stops)

    @cached_property
    def closes_answer(self) -> str:
        """The text that the template writes after an answer at the end of the conversation; empty
        if it rejects such a conversation."""
        return self._behind_answer()

    @cached_property
    def closing_token(self) -> str | None:
        """The added token that immediately follows an answer when another message comes next: the
        answer's end token, or the next role's header. None if there is none."""
        found = next(self._added.find(self._behind_answer(_OPENING)), None)
        return found.token if found is not None and found.begin == 0 else None

    def _behind_answer(self, *following: Message) -> str:
        try:
            shown = self._render(
                [_OPENING, {"role": "assistant", "content": _ANSWER}, *following], False
            )
        except DataError:
            return ""
        return shown.partition(_ANSWER)[2]

    @property
    def ends_answer(self) -> str | None:
        """The token that ends an answer: the first stop token after it, else the last added token
        that the template writes. None if there is none."""
        found = [one.token for one in self._added.find(self.closes_answer)]
        last = found[-1] if found else None
        return next((token for token in found if token in self._stops), last)

    @cached_property
    def opens_thinking(self) -> bool:
        """True if the generation prompt ends inside a thinking block."""
        try:
            asked = self._render([_OPENING], True)
        except DataError:
            return False
        return opens_thinking(asked)

    @cached_property
    def example_call(self) -> str:
        """An answer that calls the tool `lookup` with {"key": "value"}, as the template writes it.
        Empty if it writes no calls."""
        for as_text in (False, True):
            call = _call("lookup", "call00000", {"key": "value"}, as_text)
            try:
                asked = self._render([_OPENING], True)
                shown = self._render(
                    [_OPENING, {"role": "assistant", "content": "", "tool_calls": [call]}], False
                )
            except DataError:
                continue
            alike = len(common_beginning(asked, shown))
            begin = next(
                (one.begin for one in self._added.find(shown) if one.begin < alike < one.end), alike
            )
            said = shown[begin:]
            place = said.rfind("value")
            ends = (found.begin for found in self.stops_in(said, max(place, 0)))
            return said[: next(ends, len(said))] if place >= 0 else ""
        return ""

    def report(self) -> TemplateReport:
        """Return a report on the template for the user."""
        observations = dict[str, ObservationForm]()
        problems = dict[str, str]()
        needs_calls = False
        for role in ("tool", "user"):
            for with_calls in (False, True) if role == "tool" else (False,):
                try:
                    self.check(role, with_calls=with_calls)
                    observations[role] = self._form(role, with_calls)
                except DataError as error:
                    problems.setdefault(role, str(error))
                    continue
                needs_calls |= with_calls and role in problems
                problems.pop(role, None)
                break
        return TemplateReport(
            closes_answer=self.closes_answer,
            ends_answer=self.ends_answer,
            stop_tokens=self._stops,
            roles=tuple(filter(self._knows, _ROLES)),
            observations=observations,
            problems=problems,
            needs_calls=needs_calls,
            opens_thinking=self.opens_thinking,
            drops_thinking=tuple(filter(self._drops_thinking, observations)),
            example_call=self.example_call,
        )

    # ---- continuation

    def _frame(self, exchanges: Sequence[Exchange]) -> _Frame:
        """Render the conversation with placeholders, using the first form of tool calls that the
        template accepts."""
        problem: DataError | None = None
        for form in _forms(exchanges):
            names: dict[str, str] = {}
            messages: list[Message] = [_OPENING]
            for number, exchange in enumerate(exchanges):
                messages += _marked(exchange, form, names, earlier=len(exchanges) - 1 - number)
            contents = [str(one["content"]) for one in exchanges[-1].messages]
            try:
                text, answer, begin = self._rendered(json.dumps(messages), len(contents))
                return _Frame(text, answer, begin, messages, contents, names)
            except _NoEndError:
                raise
            except DataError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _render_frame(self, messages: str, count: int) -> tuple[str, int, int]:
        """Render a JSON list of messages with placeholders. The last `count` messages follow the
        last answer. Returns the text and the two positions from `_end_of_answer`."""
        text = self._render(json.loads(messages), True)
        return text, *self._end_of_answer(text, count)

    def _end_of_answer(self, text: str, count: int) -> tuple[int, int]:
        """Return two positions in the last answer: after its first placeholder, and at its end
        (after its content, or at the stop token after its tool calls)."""
        marks = [(found[1], int(found[2]), found) for found in _MARK.finditer(text)]
        said = [found for kind, _, found in marks if kind == "A"]
        called = [found for kind, _, found in marks if kind == "V"]
        texts = [number for kind, number, _ in marks if kind == "T"]
        first = next((found.start() for kind, _, found in marks if kind == "T"), 0)
        ends = [found.end() for found in said + called]
        if len(said) > 1 or not ends or max(ends) > first or texts != list(range(count)):
            raise DataError(
                f"{self._name}: the chat template does not show an answer and the messages after "
                "it exactly once, in order; set rollout.agent.observation_role to the other role, "
                "or use a template that leaves earlier messages unchanged"
            )
        seen = min(found.end() for found in said + called)
        if not called:
            return seen, max(ends)
        stop = next((found.begin for found in self.stops_in(text, max(ends))), None)
        if stop is None or stop >= first:
            raise _NoEndError(
                f"{self._name}: the chat template writes no stop token after an answer that calls "
                f"a tool (generation stops at {', '.join(self._stops)}); add the token that the "
                "template writes there to eos_token_id in generation_config.json"
            )
        return seen, stop

    def _sampled(self, between: str, last: str | None) -> int:
        """Return how many leading characters of `between` were already sampled as the end of the
        answer."""
        if last is None:
            return 0
        first = next(self._added.find(between), None)
        mark = _MARK.search(between)
        if (
            first is not None
            and first.token == last
            and (mark is None or first.end <= mark.start())
        ):
            return first.end
        return len(last) if between.startswith(last) else 0

    def _shown(self, frame: _Frame) -> dict[str, str] | None:
        """Return {placeholder: rendered content}, or None if the content of a message changes the
        text around it."""
        shown: dict[str, str] = {}
        for number, content in enumerate(frame.contents):
            before, mark, after = frame.text[frame.answer :].partition(_mark("T", number))
            text = self._render(_with_contents(frame, {number: content}), True)
            found = text[_first_seen(text) :]
            if len(found) < len(before) + len(after) or not (
                found.startswith(before) and found.endswith(after)
            ):
                return None
            shown[mark] = found[len(before) : len(found) - len(after)]
        return shown

    def _whole(self, frame: _Frame) -> str:
        """Return the text after the answer, rendered with the real contents.

        Raises:
            DataError: a message contains a special token, which cannot be distinguished from those
                written by the template.
        """
        values = [*frame.contents, *frame.names.values()]
        if any(next(self._added.find(value), None) or _MARK.search(value) for value in values):
            raise DataError(
                f"{self._name}: the chat template's output depends on the contents of these "
                "messages, so special tokens in them would be mistaken for its own: "
                f"{str(frame.contents)[:200]}"
            )
        text = self._render(_with_contents(frame, dict(enumerate(frame.contents))), True)
        begin = _first_seen(text) + frame.begin - frame.answer
        return _MARK.sub(lambda found: frame.names.get(found[0], ""), text[begin:])

    # ---- report

    def _form(self, role: str, with_calls: bool) -> ObservationForm:
        pieces = self.following([_example(role, _SAMPLE, with_calls)])
        texts = [number for number, piece in enumerate(pieces) if piece.is_literal]
        if not texts:
            return ObservationForm("".join(piece.text for piece in pieces), "", "other")
        shown = pieces[texts[-1]].text
        forms = {_SAMPLE: "raw", _SAMPLE.strip(): "trimmed", json.dumps(_SAMPLE)[1:-1]: "json"}
        around = []
        for part in (pieces[: texts[-1]], pieces[texts[-1] + 1 :]):
            around.append("".join(piece.text for piece in part))
        return ObservationForm(around[0], around[1], forms.get(shown, "other"))

    def _knows(self, role: str) -> bool:
        messages: list[Message] = [_OPENING, {"role": role, "content": _mark("T")}]
        try:
            if role == "tool":
                self._frame([_example(role, "?", True)])
                return True
            if role != "assistant":
                messages = [*messages[1:], *(messages[:1] if role != "user" else [])]
            return _mark("T") in self._render(messages, role != "assistant")
        except _NoEndError:
            return True
        except DataError:
            return False

    def _drops_thinking(self, role: str) -> bool:
        answer = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
        try:
            return _THOUGHT not in self._render(
                [_OPENING, answer, {"role": role, "content": "?"}], True
            )
        except DataError:
            return False


def common_beginning(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[
        : next(
            (place for place, (left, right) in pairs if left != right), min(len(one), len(other))
        )
    ]


def _first_seen(text: str) -> int:
    """Return the position after the first placeholder of the last answer. The text before that
    position may depend on later messages."""
    return next(found.end() for found in _MARK.finditer(text) if found[1] in "AV")


def _with_contents(frame: _Frame, contents: Mapping[int, str]) -> list[Message]:
    """Return the messages with the real contents in place of the placeholders after the last
    answer."""
    first = len(frame.messages) - len(frame.contents)
    texts = {first + number: content for number, content in contents.items()}
    messages: list[Message] = []
    for place, one in enumerate(frame.messages):
        messages.append({**one, "content": texts.get(place, one["content"])})
    return messages


def _example(role: str, content: str, with_calls: bool) -> Exchange:
    if not with_calls:
        return Exchange([{"role": role, "content": content}])
    call = ShownCall("lookup", "call00000")
    return Exchange(
        [{"role": role, "content": content, "tool_call_id": call.id, "name": call.name}], [call]
    )


def _forms(exchanges: Sequence[Exchange]) -> Iterator[_Form]:
    most = max(len(exchange.calls) for exchange in exchanges)
    for count in (None, 1) if most > 1 else (None,):
        yield _Form(count, False, False)
        if most:
            yield _Form(count, True, False)
    for exchange in exchanges:
        if not exchange.calls and any(one["role"] == "tool" for one in exchange.messages):
            yield _Form(None, False, True)
            yield _Form(None, True, True)
            return


def _marked(exchange: Exchange, form: _Form, names: dict[str, str], earlier: int) -> list[Message]:
    """Replace the contents of an answer and of the messages after it with placeholders, and add the
    placeholders for names and ids to `names`. `earlier` is the number of exchanges that follow this
    one; all but the last exchange use a separate set of placeholders."""
    results = [one for one in exchange.messages if one["role"] == "tool"]
    calls = exchange.calls or (
        [ShownCall("tool", f"call{n:05d}") for n in range(len(results))] if form.invents else []
    )
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": _mark("E", earlier) if earlier else _ANSWER,
    }
    arguments = {"argument": _mark("U" if earlier else "V")}
    given = [
        _call(_mark_of("N", one.name, names), _mark_of("I", one.id, names), arguments, form.as_text)
        for one in calls[: form.most_calls]
    ]
    if given:
        answer["tool_calls"] = given
    unnamed = iter(calls if not exchange.calls else ())
    messages: list[Message] = [answer]
    for number, one in enumerate(exchange.messages):
        call = next(unnamed, None) if one["role"] == "tool" else None
        known = {**({} if call is None else {"tool_call_id": call.id, "name": call.name}), **one}
        shown = {"role": one["role"], "content": _mark("S" if earlier else "T", number)}
        for key, kind in (("tool_call_id", "I"), ("name", "N")):
            if key in known:
                shown[key] = _mark_of(kind, str(known[key]), names)
        messages.append(shown)
    return messages


def _mark_of(kind: str, value: str, names: dict[str, str]) -> str:
    """Return the placeholder for a name or id. Equal values share a placeholder."""
    marks = [mark for mark in names if mark.startswith(_mark(kind)[:5])]
    mark = next((mark for mark in marks if names[mark] == value), _mark(kind, len(marks)))
    names[mark] = value
    return mark


def _call(name: str, number: str, arguments: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    given = json.dumps(arguments) if as_text else arguments
    return {"id": number, "type": "function", "function": {"name": name, "arguments": given}}
