"""Exact comparison of the response with the ground truth."""

from __future__ import annotations

from hybridflow.rewards.reading import read_response
from hybridflow.rewards.verifiers.base import ScoreResult, text_truth, verifier


@verifier("exact", data_sources=["arithmetic"], runs_in_driver=True, truth=text_truth)
def exact(response: str, ground_truth: str, *, thinking_open: bool | None = None) -> ScoreResult:
    """1.0 when the answer is the ground truth, leading and trailing white space aside.

    Ground truths with the digits reversed or padded need nothing special: they are compared as they
    are written.
    """
    answer = read_response(response, bool(thinking_open)).answer
    return ScoreResult(float(answer.strip() == text_truth(ground_truth).strip()))
