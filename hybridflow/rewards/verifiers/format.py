"""The form of a response, whatever it says."""

from __future__ import annotations

import re

from hybridflow.rewards.verifiers.base import ScoreResult, verifier


@verifier("format", data_sources=["format"], runs_in_driver=True)
def format(response: str, ground_truth: object, *, sections: tuple[str, ...] = ("think", "answer")) -> ScoreResult:
    """1.0 when the response is these sections and nothing else, each once: <think>...</think> <answer>...</answer>.

    Args:
        sections: names of the tags, in order.
    """
    tags = [tag for name in sections for tag in (f"<{name}>", f"</{name}>")]
    known = "|".join(map(re.escape, tags))
    right = re.findall(known, response) == tags
    outside = re.split(known, response)[::2]  # before, between and behind the sections
    return ScoreResult(float(right and not any(text.strip() for text in outside)))
