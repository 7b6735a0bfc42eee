"""Verifier for exact matches: compares the response with the ground truth."""

from __future__ import annotations

from hybridflow.rewards.reading import read_response
from hybridflow.rewards.verifiers.base import ScoreResult, text_truth, verifier


@verifier("exact", data_sources=["arithmetic", "geometry"], runs_in_driver=True, truth=text_truth)
def exact(
    response: str,
    ground_truth: str,
    *,
    forbidden: str | int | None = None,
    thinking_open: bool | None = None,
) -> ScoreResult:
    """Return 1.0 if the answer equals the ground truth, ignoring leading and trailing whitespace.

    Digits are compared as written, even if the dataset reverses or pads them.

    Args:
        forbidden: also return the extra value `cost`, which is 1.0 if the answer contains this
            text.
        thinking_open: True if the prompt ended inside a thinking block.
    """
    answer = read_response(response, bool(thinking_open)).answer
    score = float(answer.strip() == text_truth(ground_truth).strip())
    if forbidden is None:
        return ScoreResult(score)
    return ScoreResult(score, {"cost": float(str(forbidden) in answer)})
