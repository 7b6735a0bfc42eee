"""The split of a response into thinking and answer, for verifiers, judges, tools and doors.

Reasoning models end their thinking with a closing marker; many chat templates (R1 distillations, Qwen3-Thinking)
already write the opening marker at the end of the prompt, so that a response begins inside its thinking.
"""

import re
from dataclasses import dataclass

# DeepSeek-R1, Qwen3 and GLM-4.5 write <think>, Magistral [THINK], Kimi-VL ◁think▷ and Seed-OSS <seed:think>.
_OPENERS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<seed:think>": "</seed:think>",
}
_OPENER_OF = {closer: opener for opener, closer in _OPENERS.items()}
_MARKER = re.compile("|".join(map(re.escape, [*_OPENERS, *_OPENER_OF])))

_INDENT = 64  # how far from a marker the ends of its line are looked for: many markers in one line stay linear


@dataclass(frozen=True)
class Reading:
    """A response's thinking and answer; `closed` is False where a thinking that began never ended."""

    thinking: str
    answer: str
    closed: bool


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt's text ends with an opening marker, so that the response begins inside its thinking."""
    return prompt.rstrip().endswith(tuple(_OPENERS))


def read_response(text: str, thinking_open: bool = False) -> Reading:
    """Split a response into its thinking and the answer that follows its last thinking.

    `thinking_open` says that the prompt ended with an opening marker. A thinking that never ends leaves an empty
    answer. Without any marker the whole text is the answer. After a first thinking a marker opens another one only at
    the start of a line, so that an answer (a call's arguments, for example) may mention markers. A closing marker
    that nothing opened ends a thinking where it begins or ends a line, or a tag follows it.
    """
    opener = next(iter(_OPENERS)) if thinking_open else ""
    started = ended = 0  # where the current thinking began; where the last one ended
    pieces: list[str] = []
    for marker in _MARKER.finditer(text):
        word = marker.group()
        if opener:
            if word == _OPENERS[opener] or (thinking_open and not pieces and word in _OPENER_OF):
                pieces.append(text[started : marker.start()])
                opener, ended = "", marker.end()
            elif thinking_open and word in _OPENERS and marker.start() < _INDENT and not text[: marker.start()].strip():
                opener, started = word, marker.end()  # the model repeats the prompt's marker
        elif word in _OPENERS:
            if not pieces or _begins_line(text, marker.start()):
                pieces.append(text[ended : marker.start()])
                opener, started = word, marker.end()
        elif not pieces and _stands_apart(text, marker):
            pieces.append(text[: marker.start()])
            ended = marker.end()
    if opener:
        return Reading("".join([*pieces, text[started:]]).strip(), "", closed=False)
    return Reading("".join(pieces).strip(), text[ended:] if pieces else text, closed=True)


def _begins_line(text: str, position: int) -> bool:
    before = text[max(0, position - _INDENT) : position].rstrip(" \t")
    return before.endswith("\n") or (not before and position < _INDENT)


def _stands_apart(text: str, marker: re.Match[str]) -> bool:
    after = text[marker.end() : marker.end() + _INDENT].lstrip(" \t")
    return not after or after[0] in "\r\n<" or _begins_line(text, marker.start())
