"""GSM8K: the number after "####" compared with the ground truth."""

from __future__ import annotations

import re
from decimal import Decimal

from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_MARK = "####"
# ASCII digits on purpose: \d would take digits of other scripts. Commas only between digits.
_NUMBER = r"[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+"
_LEADING_NUMBER = re.compile(rf"(?P<sign>[-+\u2212]?)\s*\$?\s*(?P<inner>[-+\u2212]?)\s*(?P<digits>{_NUMBER})")
_ANY_NUMBER = re.compile(rf"(?P<sign>(?<![0-9])[-\u2212])?\s?\$?(?P<digits>{_NUMBER})")


@verifier("gsm8k", data_sources=["openai/gsm8k"])
def gsm8k(response: str, ground_truth: str, *, flexible: bool = False) -> ScoreResult:
    """1.0 when the response's final answer equals the ground truth as an exact decimal number ("72" = "72.0" = "+72").

    Args:
        response: text with the final answer after "####".
        ground_truth: a number as text.
        flexible: where nothing can be read after a "####", take the last number of the whole text.

    Returns:
        extra["answer"] holds the number that was read in canonical form, or None.

    Raises:
        ValueError: the ground truth is not a number.
    """
    expected = _leading_number(ground_truth)
    if expected is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    answer = extract_gsm8k_answer(response, flexible=flexible)
    return ScoreResult(float(answer is not None and Decimal(answer) == Decimal(expected)), {"answer": answer})


def extract_gsm8k_answer(text: str, *, flexible: bool = False) -> str | None:
    """The final answer of a response as plain digits, e.g. "-1234.5", or None.

    Read from the first line after the last "####": an optional sign and "$", then one number with or without thousands
    commas. Words, a unit or a full stop may follow; a second number, a fraction or a range ("3 or 4", "3/4") may not:
    guessing twice is no answer.
    """
    _, mark, after = text.rpartition(_MARK)
    found = _leading_number(after) if mark else None
    if found is None and flexible and (numbers := list(_ANY_NUMBER.finditer(text))):
        found = ("-" if numbers[-1]["sign"] else "") + numbers[-1]["digits"].replace(",", "")
    return found


def _leading_number(text: str) -> str | None:
    lines = text.strip().splitlines()
    match = _LEADING_NUMBER.match(lines[0]) if lines else None
    if match is None or (match["sign"] and match["inner"]) or re.search("[0-9]", lines[0][match.end() :]):
        return None
    negative = (match["sign"] or match["inner"]) in ("-", "\u2212")
    return ("-" if negative else "") + match["digits"].replace(",", "")
