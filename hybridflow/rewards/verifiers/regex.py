"""Verifier for regular expressions: the ground truth is a pattern that the response must match."""

from __future__ import annotations

import re
from typing import Any

from hybridflow.rewards.reading import read_response
from hybridflow.rewards.verifiers.base import ScoreResult, text_truth, verifier


def _pattern(ground_truth: Any) -> re.Pattern[str]:
    try:
        return re.compile(text_truth(ground_truth), re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"the ground truth {ground_truth!r} is not a valid regular expression: {error}"
        ) from error


@verifier("regex", data_sources=["regex"], truth=_pattern)
def regex(
    response: str,
    ground_truth: str,
    *,
    whole: bool = False,
    with_thinking: bool = False,
    thinking_open: bool | None = None,
) -> ScoreResult:
    """Return 1.0 if the ground truth, a regular expression, matches anywhere in the answer. A dot
    also matches line breaks.

    Args:
        whole: require a match of the whole answer, ignoring leading and trailing whitespace.
        with_thinking: search the whole response, including its thinking and markers.
        thinking_open: True if the prompt ended inside a thinking block.

    Raises:
        ValueError: the ground truth is not a regular expression.
    """
    pattern = _pattern(ground_truth)
    text = response if with_thinking else read_response(response, bool(thinking_open)).answer
    found = pattern.fullmatch(text.strip()) if whole else pattern.search(text)
    return ScoreResult(float(found is not None))
