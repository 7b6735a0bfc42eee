"""Verifier for multiple-choice questions. Compares the letter chosen in the response with the
ground truth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from hybridflow.rewards.reading import last_box, last_section, read_response
from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_REACH = 120  # characters searched after a word that announces an answer
_ANNOUNCED = re.compile(
    r"(?i:\b(?:answer|choice|respuesta|réponse|antwort|risposta|resposta|ответ)\b)|答案|答え|정답|[选選]"
)
_SUBJECT = re.compile(
    r"(?<![A-Za-z])\(?([A-Z])\)?[*_]{0,2}\s(?:is|must be|would "
    r"be)\s(?:the\s)?(?:only\s|best\s|most\s)?"
    r"(?:correct|right|accurate|answer|best)\b"
)
# text before the letter that means it is one of several, or that nothing is stated about it
_NO_SUBJECT = re.compile(
    r"(?:(?<![A-Za-z])[A-Z][)*_]{0,3},?\s(?:and|or|nor)\s|"
    r"(?i:\b(?:neither|either|not|nor|if|whether|unless)\s))"
    r"[(*_]{0,3}$"
)
# limits of the search: characters at the end, and statements in them
_NEAR_END = 20_000
_MOST_STATEMENTS = 200
_NAMED = re.compile(r"(?i:\boption\b)")
# text between the announcement and its letter; ends with a verb or a colon
_VERB = re.compile(
    r"(?i:[^.\n:：=]{0,40}?(?:\b(?:is|are|be|es|est|ist|was)\b|[:：=]|是|为|為|は|은))"
)
# end of a statement; the rest is discussion
_OVER = re.compile(
    r"[.。!！?？\n;；]|"
    r"(?i:,?\s(?:because|since|as|not|rather|instead|over|which|given|so|but|while|whereas)\b)|"
    r"[,，](?=\s?[A-Za-z]{2})"
)
_LETTER = re.compile(r"(?<![A-Za-z\\'’0-9])([A-Za-z])(?![A-Za-z'’0-9])")
# "B) Paris", "(B) Paris", "B: Paris"
_FIRST = re.compile(r"[\s\"'“‘(\[]{0,6}([A-Za-z])[)\].:：,](?![A-Za-z])")
_DECORATION = re.compile(
    r"\\(?:text|math)(?:bf|it|rm|sf|tt|normal)?|\\boldsymbol|\\left|\\right|\\[ "
    r",;:!]|[{}$*_`]|</?\w+>"
)
_RULED_OUT = re.compile(
    r"(?i:\s{0,2}(?:is|was|seems|looks)\s(?:also\s)?(?:wrong|incorrect|not|false|out)|,?\stoo\b)"
)


def _letter(ground_truth: Any) -> str:
    """Convert a ground truth to its letter. It may be a letter ("B", "(b)") or, as in MMLU, the
    0-based index of an option."""
    if isinstance(ground_truth, str):
        expected = ground_truth.strip().strip("()").upper()
        if re.fullmatch("[A-Z]", expected):
            return expected
    is_index = isinstance(ground_truth, int) and not isinstance(ground_truth, bool)
    if is_index and 0 <= ground_truth < 26:
        return chr(ord("A") + ground_truth)
    raise ValueError(
        f"the ground truth {ground_truth!r} is neither a letter nor the 0-based index of an option"
    )


@verifier(
    "choice",
    data_sources=[
        "multiple_choice",
        "cais/mmlu",
        "TIGER-Lab/MMLU-Pro",
        "Idavidrein/gpqa",
        "allenai/ai2_arc",
    ],
    runs_in_driver=True,
    truth=_letter,
)
def choice(
    response: str, ground_truth: str | int, *, thinking_open: bool | None = None
) -> ScoreResult:
    r"""Return 1.0 if the response's choice is the ground truth.

    The choice is the letter in the last \boxed{} or <answer>, or after "answer" or "choice",
    whichever comes last. If there is none, it is the last option that is not ruled out ("option A
    is wrong"), or else a letter at the end of the response (or as the whole response). A statement
    that names several letters is not a choice; neither are the words "I" and "a".

    Args:
        ground_truth: one letter, or the 0-based index of the option.
        thinking_open: True if the prompt ended inside a thinking block.

    Returns:
        extra["answer"] is the parsed letter, or None.

    Raises:
        ValueError: the ground truth is neither a letter nor an index.
    """
    expected = _letter(ground_truth)
    reading = read_response(response, bool(thinking_open))
    answer = _read(reading.answer)
    return ScoreResult(float(answer == expected), {"answer": answer})


def _read(text: str) -> str | None:
    box = last_box(text)
    section = last_section(text, "answer")
    section_start = text.rfind("<answer>")
    if section_start > text.rfind("</answer>"):
        return None  # the section is cut off
    statements: list[tuple[int, str | None]] = []
    if box is not None:
        if box.content is None:
            return None
        statements.append((box.start, _of_statement(box.content)))
    if section is not None:
        statements.append((section_start, _of_statement(section)))
    statements += _announced(text, box.start if box is not None else None)
    if statements:
        _, letter = max(statements, key=itemgetter(0))
        return letter
    return next(_options(text), None) or _at_the_end(text)


def _last_statements(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Return the matches near the end of the text, from last to first."""
    near = max(len(text) - _NEAR_END, 0)
    found = list(pattern.finditer(text, near))
    return reversed(found[-_MOST_STATEMENTS:])


def _before(text: str, found: re.Match[str]) -> str:
    """Return the few characters before a match."""
    return text[max(0, found.start() - 12) : found.start()]


def _announced(text: str, box_start: int | None) -> Iterator[tuple[int, str | None]]:
    """Yield the position and letter of the last "the answer is B" and the last "B is correct". The
    letter is None if the statement names several letters or is negated. Text that merely introduces
    a boxed answer does not count as a separate statement."""
    for found in _last_statements(_ANNOUNCED, text):
        after = text[found.end() : found.end() + _REACH]
        verb = _VERB.match(after)
        if verb is None and not re.match(r"[\s*_(]{0,4}[A-Z](?![A-Za-z])", after):
            continue
        begin = verb.end() if verb else 0
        announces_box = box_start is not None and 0 <= box_start - found.end() <= begin + 8
        statement = after[begin:]
        denied = re.match(r"\s{0,4}not\b", statement)
        letters = [] if announces_box or denied else _letters(statement)
        if letters or denied:
            yield found.start(), letters[0] if len(letters) == 1 else None
            break
    for found in _last_statements(_SUBJECT, text):
        if not _NO_SUBJECT.search(_before(text, found)):
            yield found.start(), found[1]
            break


def _options(text: str) -> Iterator[str]:
    """Yield the letter of each "option B" that is not ruled out, from last to first."""
    for found in _last_statements(_NAMED, text):
        after = _DECORATION.sub("", text[found.end() : found.end() + _REACH])
        letter = re.match(r"\s{0,2}[(\[]?([A-Z])\b[)\]]?", after)
        before = _before(text, found)
        denied = re.search(r"(?i:\b(?:not|isn't|reject|exclude|eliminate)\s{1,2})$", before)
        if letter and not denied and not _RULED_OUT.match(after, letter.end()):
            yield letter[1]


def _letters(text: str) -> list[str]:
    """Return the letters named up to the end of a statement. Lower-case letters count only if they
    stand alone or are in parentheses."""
    bare = _DECORATION.sub("", text.lstrip(" \t\n*_:：="))
    first = _FIRST.match(bare)
    if first and (first[1].isupper() or "(" in first.group()):
        rest = bare[first.end() :]
        line, _, _ = rest.partition("\n")
        further = re.findall(r"(?<![A-Za-z])([A-Z])(?=\))", line)
        if not further and _LETTER.match(rest.lstrip()):
            further = ["?"]
        return [first[1].upper(), *further[:1]]
    ended = _OVER.search(bare)
    statement = bare[: ended.start()] if ended else bare
    statement = statement.strip(" \"'“”()[]")
    if re.fullmatch("[A-Za-z]", statement):
        return [statement.upper()]
    if re.match(r"(?i:not|none|neither|no|except|any)\b", statement):
        return []
    found = []
    for letter in _LETTER.finditer(statement):
        word = re.match(r"\s(?!and\b|or\b)[a-z]{1,20}", statement[letter.end() :])
        if letter[1].isupper() and not (letter[1] in "AI" and word):
            found.append(letter[1])
    return list(dict.fromkeys(found))


def _of_statement(text: str) -> str | None:
    letters = _letters(text)
    return letters[0] if len(letters) == 1 else None


def _at_the_end(text: str) -> str | None:
    _, newline, last = text.strip().rpartition("\n")
    line = _DECORATION.sub("", last[-_REACH:]).strip()
    if re.match(r"\(?[A-Z][).:]\s", line) and not newline:
        return line.lstrip("(")[0]
    sentence = re.split(r"(?<=[.!?])\s", line)[-1]
    ends_in_letter = re.search(r"[A-Z]['\")\]]{0,2}[.。]?$", sentence)
    if not ends_in_letter and not re.fullmatch(r"\(?[A-Za-z]\)?\.?", sentence):
        return None
    if len(sentence) < 5:
        return sentence.strip("()[].\"'").upper()[:1] or None
    letters = [letter for letter in _LETTER.findall(sentence) if letter.isupper()]
    named = set(letters) if len(letters) == 1 else set(letters) - {"I"}
    ends = re.search(r"(?<![A-Za-z])([A-Z])['\")\]]{0,2}[.。]?$", sentence)
    return ends[1] if ends and named == {ends[1]} else None
