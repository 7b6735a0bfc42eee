"""Parsing of responses into thinking and answer, and of the boxes, fenced blocks and tagged
sections in an answer. Shared by verifiers, judges, tools and the completions server. Every function
runs in time linear in the length of the text.

Reasoning models end their thinking with a closing marker. Many chat templates (R1 distillations,
Qwen3-Thinking) put the opening marker at the end of the prompt, so the response starts inside the
thinking block.
"""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

# texts up to this length take at most about 10 ms and are parsed in the driver; longer ones in a
# pool process or a thread
DRIVER_CHARACTERS = 100_000

# DeepSeek-R1, Qwen3 and GLM-4.5 write <think>, Magistral [THINK], Kimi-VL ◁think▷, Seed-OSS
# <seed:think>, MiniMax-M3 <mm:think>, EXAONE <thought>, and Kimi-K3 and Gemma 4 the last two.
_OPENERS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<thought>": "</thought>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "<|channel>thought": "<channel|>",
}
_OPENER_OF = {closer: opener for opener, closer in _OPENERS.items()}
_MARKER = re.compile("|".join(map(re.escape, [*_OPENERS, *_OPENER_OF])))

# gpt-oss: a response is a sequence of messages, each in a channel, and analysis is its thinking
_FIRST_MESSAGE = re.compile(r"\s{0,8}<\|channel\|>(?:analysis|commentary|final)\b")
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>")
_FINAL = "<|channel|>final<|message|>"
_END_OF_MESSAGE = "<|end|>"

# how far to look for the start or end of a marker's line: keeps many markers on one line linear
_INDENT = 64
_BRACE = re.compile(r"\\(?P<box>boxed|fbox)\s{0,8}\{|\\.|\{++|\}++", re.DOTALL)
# text allowed between boxes of one answer: "\boxed{1} and \boxed{2}"
_BETWEEN_BOXES = re.compile(
    r"[\s$,;、，]{0,16}(?:\\text\{)?\s{0,8}(?:and|or|和|或)?\s{0,8}\}?[\s$,;、，]{0,16}"
)
_FENCE = re.compile(r"(?P<fence>`{3,}|~{3,})[ \t]*(?P<label>[^\s`~{]*)[^`]*$")
_MAX_LONGER = 4  # later closing fences to which a block may be extended


@dataclass(frozen=True)
class Reading:
    """A response split into thinking and answer. `closed` is False if the thinking block never
    ended."""

    thinking: str
    answer: str
    closed: bool


def opens_thinking(prompt: str) -> bool:
    """Return True if the prompt ends with an opening marker; the response then starts inside a
    thinking block."""
    return prompt.rstrip().endswith(tuple(_OPENERS))


def has_markers(text: str) -> bool:
    """Return True if the text contains a thinking marker."""
    return _MARKER.search(text) is not None


def read_response(
    text: str, thinking_open: bool = False, verbatim: Sequence[tuple[int, int]] = ()
) -> Reading:
    """Split a response into its thinking and the answer after the last thinking block.

    `thinking_open` indicates that the prompt ended with an opening marker. If a block is not
    closed, the answer is empty. Without markers, the whole text is the answer. After a quotation
    mark, or after the first block, an opening marker counts only at the start of a line, so an
    answer may mention markers, for example in the arguments of a call. A closing marker without an
    opening marker ends a block only if it starts or ends a line, or is followed by a tag. Markers
    inside the spans `verbatim` (in text order) are ignored.
    """
    if _FIRST_MESSAGE.match(text):
        return _read_messages(text)
    opener = next(iter(_OPENERS)) if thinking_open else ""
    started = ended = 0  # start of the current block; end of the last one
    pieces: list[str] = []
    for marker in _MARKER.finditer(text):
        word = marker.group()
        begin, end = marker.span()
        if opener:
            if word == _OPENERS[opener] or (thinking_open and not pieces and word in _OPENER_OF):
                pieces.append(text[started:begin])
                opener = ""
                ended = end
            elif (
                thinking_open and word in _OPENERS and begin < _INDENT and not text[:begin].strip()
            ):
                # the model repeated the prompt's marker
                opener = word
                started = end
        elif _is_within(begin, verbatim):
            continue
        elif word in _OPENERS:
            if _begins_line(text, begin) or not (pieces or _is_quoted(text, begin)):
                pieces.append(text[ended:begin])
                opener = word
                started = end
        elif not pieces and _stands_apart(text, marker):
            pieces.append(text[:begin])
            ended = end
    if opener:
        pieces.append(text[started:])
        return Reading("".join(pieces).strip(), "", closed=False)
    return Reading("".join(pieces).strip(), text[ended:], closed=True)


def _read_messages(text: str) -> Reading:
    """Split a response in gpt-oss's message format. The answer is the last message in the channel
    `final`; if there is none, it is the text between the analysis messages, i.e. the tool calls."""
    thinking: list[str] = []
    rest: list[str] = []
    ended = 0
    for head in _ANALYSIS.finditer(text):
        if head.start() < ended:
            continue
        end = text.find(_END_OF_MESSAGE, head.end())
        rest.append(text[ended : head.start()])
        if end < 0:
            thinking.append(text[head.end() :])
            return Reading("".join(thinking).strip(), "", closed=False)
        thinking.append(text[head.end() : end])
        ended = end + len(_END_OF_MESSAGE)
    rest.append(text[ended:])
    answer = "".join(rest)
    final = answer.rfind(_FINAL)
    if final >= 0:
        answer = answer[final + len(_FINAL) :]
    return Reading("".join(thinking).strip(), answer, closed=True)


def _is_within(position: int, spans: Sequence[tuple[int, int]]) -> bool:
    place = bisect.bisect_right(spans, (position, position)) - 1
    if place < 0:
        return False
    begin, end = spans[place]
    return begin < position < end


def _begins_line(text: str, position: int) -> bool:
    before = text[max(0, position - _INDENT) : position].rstrip(" \t")
    return before.endswith("\n") or (not before and position < _INDENT)


def _is_quoted(text: str, position: int) -> bool:
    before = text[max(0, position - 4 * _INDENT) : position]
    return '"' in before or "`" in before


def _stands_apart(text: str, marker: re.Match[str]) -> bool:
    after = text[marker.end() : marker.end() + _INDENT].lstrip(" \t")
    return not after or after[0] in "\r\n<" or _begins_line(text, marker.start())


@dataclass(frozen=True)
class Box:
    r"""A \boxed{} or \fbox{} in a text: its content (None if the box is not closed) and its
    position."""

    content: str | None
    start: int


def last_box(text: str) -> Box | None:
    r"""Return the last box in a text. Boxes separated only by a comma or "and" are merged:
    \boxed{1}, \boxed{2}.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    open_braces: list[int] = []  # for each open brace the start of its box, or -1
    # (start, start of the content, end of the content), in order of their ends
    spans: list[tuple[int, int, int]] = []
    begins: dict[int, int] = {}
    for found in _BRACE.finditer(text):
        sign = found[0]
        if sign[0] == "{":
            open_braces += [-1] * len(sign)
        elif sign[0] == "}":
            first = found.start()
            closed = min(len(sign), len(open_braces))
            for end in range(first, first + closed):
                start = open_braces.pop()
                if start >= 0:
                    spans.append((start, begins[start], end))
        elif found["box"]:
            open_braces.append(found.start())
            begins[found.start()] = found.end()
    last_open = max(open_braces, default=-1)
    last = max(spans, default=None)
    if last is None or last_open > last[0]:
        return Box(None, last_open) if last_open >= 0 else None
    joined = [last]
    for span in sorted(spans, reverse=True)[1:]:
        between = slice(span[2] + 1, joined[-1][0])
        if between.start > between.stop or not _BETWEEN_BOXES.fullmatch(text[between]):
            break
        joined.append(span)
    contents = [text[begin:end].strip() for _, begin, end in reversed(joined)]
    return Box(", ".join(dict.fromkeys(contents)), joined[-1][0])


def boxed(content: str) -> str:
    """Return the LaTeX source of a box with this content."""
    return f"\\boxed{{{content}}}"


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        label: the language after the opening fence in lower case, or "".
        text: the text between the fences, dedented by the indentation of the opening fence.
        closed: True if there is a closing fence.
        longer: alternative texts that extend to later closing fences, shortest first, for programs
            that contain a fence.
    """

    label: str
    text: str
    closed: bool
    longer: tuple[str, ...] = ()


def fenced_blocks(text: str) -> list[Block]:
    """Return the fenced blocks in a Markdown text, in order. A fence may follow other text on its
    line."""
    lines = text.replace("\r\n", "\n").split("\n")
    closings = [number for number, line in enumerate(lines) if _closes(line)]
    found: list[Block] = []
    number = 0
    while number < len(lines):
        opening = _opening(lines[number])
        if opening is None:
            number += 1
            continue
        indent, label = opening
        first = bisect.bisect_left(closings, number + 1)
        ends = closings[first : first + 1 + _MAX_LONGER]
        if not ends:
            body = _body(lines, number + 1, len(lines), indent)
            found.append(Block(label, body, closed=False))
            break
        labelled = _labelled_opening(lines, number + 1, ends[-1])
        body = _body(lines, number + 1, ends[0], indent)
        longer = []
        for end in ends[1:]:
            if end < labelled:
                longer.append(_body(lines, number + 1, end, indent))
        found.append(Block(label, body, closed=True, longer=tuple(longer)))
        number = ends[0] + 1
    return found


def _labelled_opening(lines: list[str], begin: int, end: int) -> int:
    """Return the first line in [begin, end) with an opening fence that has a label; `end + 1` if
    there is none."""
    for number in range(begin, end):
        opening = _opening(lines[number])
        if opening is not None and opening[1]:
            return number
    return end + 1


def _opening(line: str) -> tuple[str, str] | None:
    """Return the indentation and label of an opening fence at the end of a line, or None if there
    is no fence."""
    fences = [at for at in (line.find("```"), line.find("~~~")) if at >= 0]
    if not fences:
        return None
    position = min(fences)
    match = _FENCE.match(line, position)
    if match is None:
        return None
    before = line[:position]
    indent = "" if before.strip() else before
    return indent, match["label"].lower()


def _closes(line: str) -> bool:
    """Return True if a line ends with a fence."""
    return line.rstrip().endswith(("```", "~~~"))


def _body(lines: list[str], begin: int, end: int, indent: str) -> str:
    body = lines[begin:end]
    if end < len(lines):
        rest = lines[end].rstrip().rstrip("`~")
        if rest.strip():
            body.append(rest)
    return "\n".join(line.removeprefix(indent) for line in body)


def last_section(text: str, name: str) -> str | None:
    """Return the text of the last <name>...</name>, or None if there is no such section or it is
    not closed."""
    start = text.rfind(f"<{name}>")
    end = text.find(f"</{name}>", start)
    return None if start < 0 or end < 0 else text[start + len(name) + 2 : end]
