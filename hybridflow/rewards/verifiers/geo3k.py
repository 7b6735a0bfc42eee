"""Geometry3K: the answer counts most, and that the response thinks first and boxes it counts a little."""

from __future__ import annotations

import re

from hybridflow.rewards.verifiers.base import ScoreResult, verifier
from hybridflow.rewards.verifiers.math import math

_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


@verifier("geo3k", data_sources=["hiyouga/geometry3k"], requires="math_verify")
def geo3k(response: str, ground_truth: str, *, format_share: float = 0.1) -> ScoreResult:
    r"""The `math` score, and `format_share` of the whole for <think>...</think> before a \boxed{} answer."""
    judged, form = math(response, ground_truth), float(_FORM.fullmatch(response.strip()) is not None)
    score = (1 - format_share) * judged.score + format_share * form
    return ScoreResult(score, {**judged.extra, "accuracy": judged.score, "format": form})
