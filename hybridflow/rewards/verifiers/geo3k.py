"""Geometry3K: a correct answer earns most of the score, and the required format earns a small
share."""

from __future__ import annotations

from hybridflow.rewards.reading import last_box, read_response
from hybridflow.rewards.verifiers.base import ScoreResult, text_truth, verifier
from hybridflow.rewards.verifiers.math import math


@verifier("geo3k", data_sources=["hiyouga/geometry3k"], requires="math_verify", truth=text_truth)
def geo3k(
    response: str,
    ground_truth: str,
    *,
    format_share: float = 0.1,
    literal: bool = True,
    comparison_s: float = 5.0,
    thinking_open: bool | None = None,
) -> ScoreResult:
    r"""Return the `math` score, except that `format_share` of the total is awarded for a thinking
    block followed by a \boxed{} answer.
    """
    judged = math(
        response,
        ground_truth,
        literal=literal,
        comparison_s=comparison_s,
        thinking_open=thinking_open,
    )
    reading = read_response(response, bool(thinking_open))
    box = last_box(reading.answer)
    form = float(bool(reading.thinking) and box is not None and box.content is not None)
    score = (1 - format_share) * judged.score + format_share * form
    return ScoreResult(score, {**judged.extra, "accuracy": judged.score, "format": form})
