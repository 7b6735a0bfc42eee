"""Multiple choice: the letter of the answer."""

from __future__ import annotations

import re

from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_LETTER = r"[*_{(\[]*\s*(?:\\text(?:bf)?\{)?([A-Z])(?![A-Za-z'])"
_SAID = re.compile(rf"(?i:\b(?:answer|choice|option)(?:\s+is)?)\s*[:*]*\s*(?:\\boxed\{{)?{_LETTER}|\\boxed\{{{_LETTER}")
_ALONE = re.compile(r"(?<![A-Za-z])\(?([A-Z])\)?[.]?\s*$")


@verifier(
    "choice",
    data_sources=["multiple_choice", "cais/mmlu", "TIGER-Lab/MMLU-Pro", "Idavidrein/gpqa", "allenai/ai2_arc"],
    runs_in_driver=True,
)
def choice(response: str, ground_truth: str) -> ScoreResult:
    r"""1.0 when the response's choice is the ground truth, one capital letter.

    The choice is the last letter behind "answer", "choice" or "option" or in \boxed{}; without one, the letter that
    ends the response.

    Returns:
        extra["answer"] holds the letter that was read, or None.

    Raises:
        ValueError: the ground truth is not a letter.
    """
    expected = ground_truth.strip().strip("()").upper()
    if not re.fullmatch("[A-Z]", expected):
        raise ValueError(f"the ground truth {ground_truth!r} is not a letter")
    said = [first or second for first, second in _SAID.findall(response)]
    alone = _ALONE.search(response[-20:])
    answer = said[-1] if said else alone[1] if alone else None
    return ScoreResult(float(answer == expected), {"answer": answer})
