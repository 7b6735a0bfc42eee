"""Exact comparison of the response with the ground truth."""

from __future__ import annotations

from hybridflow.rewards.verifiers.base import ScoreResult, verifier


@verifier("exact", data_sources=["arithmetic"], runs_in_driver=True)
def exact(response: str, ground_truth: str) -> ScoreResult:
    """1.0 when the response is the ground truth, leading and trailing white space aside.

    Ground truths with the digits reversed or padded need nothing special: they are compared as they are written.
    """
    return ScoreResult(float(response.strip() == ground_truth.strip()))
