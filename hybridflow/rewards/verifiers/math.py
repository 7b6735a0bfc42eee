"""Mathematics: an answer that is equal to the ground truth, however it is written, by the package math-verify."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from hybridflow.rewards.latex import cheap_prediction
from hybridflow.rewards.verifiers.base import ScoreResult, verifier

_SOURCES = (
    *("math", "math_dapo", "math_dapo_reasoning", "aime*", "lighteval/MATH", "HuggingFaceH4/MATH-500"),
    *("DigitalLearningGmbH/MATH-lighteval", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"),
    *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
)

_TRUTHS = 4096  # ground truths that a process keeps as it has read them


@verifier("math", data_sources=_SOURCES, requires="math_verify")
def math(response: str, ground_truth: str) -> ScoreResult:
    r"""1.0 when the answer of the response equals the ground truth: 1/2, 0.5 and \frac{1}{2} are one number.

    Args:
        response: text whose answer is in \boxed{}, in LaTeX, or its last expression.
        ground_truth: the answer in LaTeX or as plain text.

    Returns:
        extra["answer"] holds the answer that was read, or None.

    Raises:
        ValueError: nothing can be read from the ground truth.
    """
    parse_truth, parse_answer, verify = _functions()
    with cheap_prediction():
        expected = parse_truth(f"\\boxed{{{ground_truth}}}")
        if not expected:
            raise ValueError(f"the ground truth {ground_truth!r} is no expression")
        found = parse_answer(response)
    return ScoreResult(float(bool(found) and verify(expected, found)), {"answer": str(found[-1]) if found else None})


@functools.cache
def _functions() -> tuple[Callable[[str], Any], Callable[[str], Any], Callable[[Any, Any], bool]]:
    """How a ground truth and an answer are read, and compared. Calls have the deadline of the pool in place of
    math-verify's, which needs the main thread. The samples of a prompt have one ground truth, which is read once."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for part in ("parser", "grader"):  # they warn that calls have no deadline of math-verify's
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    latex, both = [LatexExtractionConfig()], [ExprExtractionConfig(), LatexExtractionConfig()]
    return (
        functools.lru_cache(_TRUTHS)(functools.partial(parse, extraction_config=latex, parsing_timeout=None)),
        functools.partial(parse, extraction_config=both, parsing_timeout=None),
        functools.partial(verify, timeout_seconds=None),
    )
