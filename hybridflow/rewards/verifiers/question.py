"""Verifier for open questions: the answer must match one of the accepted answers."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.reading import last_section, read_response
from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _targets(ground_truth: Any) -> list[str]:
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else None
    targets = (
        [target]
        if isinstance(target, str)
        else list(target if isinstance(target, Sequence) else ())
    )
    if not targets or not all(isinstance(one, str) for one in targets):
        raise ValueError(
            f'the ground truth {ground_truth!r} must have the form {{"target": ANSWER}} or '
            f'{{"target": [ANSWER, ...]}}'
        )
    return targets


@verifier("question", data_sources=["searchR1_*"], runs_in_driver=True, truth=_targets)
def question(
    response: str,
    ground_truth: Mapping[str, Sequence[str] | str],
    *,
    thinking_open: bool | None = None,
) -> ScoreResult:
    """Return 1.0 if the last <answer> of the response is one of the targets, ignoring case,
    punctuation, articles and whitespace (SQuAD's exact match, arXiv 1606.05250).

    Args:
        ground_truth: {"target": ANSWER} or {"target": [ANSWER, ...]}.
        thinking_open: True if the prompt ended inside a thinking block.

    Returns:
        extra["answer"] is the parsed answer, or None.
    """
    found = last_section(read_response(response, bool(thinking_open)).answer, "answer")
    answer = found.strip() if found is not None else None
    right = answer is not None and _normal(answer) in map(_normal, _targets(ground_truth))
    return ScoreResult(float(right), {"answer": answer})


def _normal(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
