"""A regular expression that the response has to match."""

from __future__ import annotations

import re

from hybridflow.rewards.verifiers.base import ScoreResult, verifier


@verifier("regex", data_sources=["regex"])
def regex(response: str, ground_truth: str, *, whole: bool = False) -> ScoreResult:
    """1.0 when the ground truth, a regular expression, is found in the response (`whole`: when it matches all of it,
    white space at both ends aside). A dot matches a line's end too.

    Raises:
        ValueError: the ground truth is no regular expression.
    """
    try:
        pattern = re.compile(ground_truth, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the ground truth {ground_truth!r} is no regular expression: {error}") from error
    found = pattern.fullmatch(response.strip()) if whole else pattern.search(response)
    return ScoreResult(float(found is not None))
