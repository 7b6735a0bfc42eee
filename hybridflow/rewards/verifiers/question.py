"""Open questions: the text of the answer is one of the known answers."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@verifier("question", data_sources=["searchR1_*"], runs_in_driver=True)
def question(response: str, ground_truth: Mapping[str, Sequence[str] | str]) -> ScoreResult:
    """1.0 when the last <answer> of the response is one of the targets; case, punctuation, articles and white space
    aside (the exact match of SQuAD, arXiv 1606.05250).

    Args:
        ground_truth: {"target": an answer, or a list of them}.

    Returns:
        extra["answer"] holds the answer that was read, or None.
    """
    target = ground_truth["target"]
    targets = [target] if isinstance(target, str) else list(target)
    found = _ANSWER.findall(response)
    answer = found[-1].strip() if found else None
    right = answer is not None and _normal(answer) in map(_normal, targets)
    return ScoreResult(float(right), {"answer": answer})


def _normal(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
