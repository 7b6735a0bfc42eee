"""GSM8K: compares the number after "####" with the ground truth."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal

from hybridflow.rewards.reading import last_box, read_response
from hybridflow.rewards.verifiers.base import ScoreResult, text_truth, verifier

_MARK = "####"
# ASCII digits only: \d would match digits of other scripts. Commas only between digits.
_NUMBER = r"[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+"
_LEADING_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?)\s{0,4}\$?\s{0,4}"
    rf"(?P<inner>[-+\u2212]?)\s{{0,4}}(?P<digits>{_NUMBER})"
)
# a number after the answer that belongs to a unit (m2), or to the words before it (for 2 eggs)
_BELONGING_NUMBER = re.compile(
    r"^(?:[kcm]?m|ft|in|yd)[23]\b|(?<![A-Za-z0-9])(?!x[0-9])[A-Za-z]+[0-9]+\b|"
    rf"\b(?:after|at|by|during|every|for|from|in|of|on|over|per|with|within) \$?(?:{_NUMBER})\b"
)
_ANY_NUMBER = re.compile(rf"(?P<sign>(?<![0-9])[-\u2212])?\s?\$?(?P<digits>{_NUMBER})")
# Markdown, LaTeX and currency decoration around a number
_DECORATION = re.compile(
    r"[*`]|\\[()\[\],!]|\\text(?:bf|rm|it)?(?=\{)|(?<!\d)[{}]|[{}](?!\d)|^answer\s?:\s?",
    re.IGNORECASE,
)
_CURRENCY = re.compile(r"\\\$|[£€¥₹]")


def _expected(ground_truth: object) -> str:
    number = _leading_number(text_truth(ground_truth))
    if number is None:
        raise ValueError(f"the ground truth {ground_truth!r} must be a number")
    return number


@verifier("gsm8k", data_sources=["openai/gsm8k"], runs_in_driver=True, truth=_expected)
def gsm8k(
    response: str, ground_truth: str, *, flexible: bool = False, thinking_open: bool | None = None
) -> ScoreResult:
    """Return 1.0 if the final answer equals the ground truth as an exact decimal number ("72" =
    "72.0" = "+72").

    Strict mode requires the dataset's "####". The number after it may be decorated: bold type, a
    box, dollars and other currencies, parentheses, "Answer:". Words before the number and
    approximations ("~72") are not accepted. verl's strict mode does not accept decoration either;
    `flexible` corresponds to its flexible mode.

    Args:
        response: text with the final answer after "####".
        ground_truth: a number, or a number as text.
        flexible: if no number follows a "####", use the number in the last box, or the last number
            of the whole text. If the last box is not closed, there is no answer.
        thinking_open: True if the prompt ended inside a thinking block.

    Returns:
        extra["answer"] is the parsed number in canonical form, or None.

    Raises:
        ValueError: the ground truth is not a number.
    """
    expected = _expected(ground_truth)
    answer = extract_gsm8k_answer(
        read_response(response, bool(thinking_open)).answer, flexible=flexible
    )
    return ScoreResult(
        float(answer is not None and Decimal(answer) == Decimal(expected)), {"answer": answer}
    )


def extract_gsm8k_answer(text: str, *, flexible: bool = False) -> str | None:
    """Extract the final answer of a response as plain digits, e.g. "-1234.5". Returns None if there
    is none.

    Uses the last "####" with digits on its line (without digits, it is a heading): an optional sign
    and "$", then one number with or without thousands separators. The number may be followed by
    words, a unit ("540 m2"), a full stop, or words that contain another number ("18 dollars for 2
    eggs"), but not by a second answer ("3 or 4", "3/4", "18 (or 25)").
    """
    lines = map(_first_line, reversed(text.split(_MARK)[1:]))
    found = _leading_number(next((line for line in lines if re.search("[0-9]", line)), ""))
    if found is None and flexible:
        box = last_box(text)
        last = _last_number(text if box is None else box.content or "")
        found = last and ("-" if last["sign"] else "") + last["digits"].replace(",", "")
    return found


def _last_number(text: str) -> re.Match[str] | None:
    # a list of all matches of a long text takes longer than the search
    last = deque(_ANY_NUMBER.finditer(text), maxlen=1)
    return last[0] if last else None


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""


def _bare(line: str) -> str:
    """Strip the decoration around the number on a line."""
    box = last_box(line)
    if box is not None:
        line = (box.content or "") if not re.search("[0-9]", line[: box.start]) else line
    line = _CURRENCY.sub("$", _DECORATION.sub("", line.replace("{,}", ","))).strip()
    return line[1:-1] if line.startswith("(") and line.rstrip(".").endswith(")") else line


def _leading_number(text: str) -> str | None:
    line = _bare(_first_line(text))
    match = _LEADING_NUMBER.match(line)
    if match is None or (match["sign"] and match["inner"]):
        return None
    rest = line[match.end() :]
    if re.search("[0-9]", rest if re.search(r"\bor\b", rest) else _BELONGING_NUMBER.sub("", rest)):
        return None
    negative = (match["sign"] or match["inner"]) in ("-", "\u2212")
    return ("-" if negative else "") + match["digits"].replace(",", "")
