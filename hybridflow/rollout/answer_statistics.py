"""Statistics for multiple answers per prompt: mean@k, best@k, worst@k, pass@k and maj@k.

Each is the expected value for k answers drawn without replacement from the N samples (maj@k: the
mean over N // k blocks of k answers), so a value for k < N is comparable to a validation with k
answers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

_RIGHT = "\0right"  # the common vote of all correct answers, whatever their notation
_ANSWER = ("answer", "pred")  # names under which rewards return the parsed answer


def answer_statistics(
    scores: np.ndarray, samples: int, extras: Sequence[Mapping[str, Any] | None] | None = None
) -> dict[str, float]:
    """Compute mean@N and, for k = 2, 4, 8, ... and N, best@k and worst@k.

    Also compute pass@k (the fraction of prompts solved by at least one of k answers) if every score
    is 0 or 1, and maj@k if the reward returned an `answer` or `pred` for every row.

    Args:
        scores: [P * N] scores; the N answers to each prompt are consecutive.
        samples: N, the number of answers per prompt.
        extras: [P * N] extra values returned by the reward.
    """
    by_prompt = statistics_by_prompt(scores, samples, extras, numbers_up_to(samples))
    found = {name: float(values.mean()) for name, values in by_prompt.items()}
    scores_PN = np.asarray(scores, np.float64).reshape(-1, samples)
    found[f"mean@{samples}"] = float(scores_PN.mean())
    return found


def statistics_by_prompt(
    scores: np.ndarray,
    samples: int,
    extras: Sequence[Mapping[str, Any] | None] | None,
    ks: Sequence[int],
) -> dict[str, np.ndarray]:
    """Compute the statistics of `answer_statistics` separately for each prompt, for each k in `ks`.
    Returns {statistic: values [P]}. The other arguments are the same as for `answer_statistics`.
    """
    scores_PN = np.asarray(scores, np.float64).reshape(-1, samples)
    answers = _answers(extras)
    is_binary = np.isin(scores_PN, (0.0, 1.0)).all()
    # all correct answers count as equal, whatever their notation, such as 0.5 and 1/2
    if answers is not None and is_binary:
        scored = zip(scores_PN.ravel(), answers, strict=True)
        answers = [_RIGHT if score else answer for score, answer in scored]
    found = {f"mean@{samples}": scores_PN.mean(axis=1)}
    for k in ks:
        found[f"best@{k}"] = best_of(scores_PN, k)
        found[f"worst@{k}"] = -best_of(-scores_PN, k)
        if is_binary:
            found[f"pass@{k}"] = found[f"best@{k}"]
        if answers is not None:
            by_prompt = _by_prompt(scores_PN, answers)
            found[f"maj@{k}"] = np.array([majority(*rows, k) for rows in by_prompt])
    return found


def numbers_up_to(samples: int) -> list[int]:
    """Return the powers of two (2, 4, 8, ...) below `samples`, followed by `samples` itself."""
    found = []
    k = 2
    while k < samples:
        found.append(k)
        k *= 2
    return [*found, samples]


def best_of(scores_PN: np.ndarray, k: int) -> np.ndarray:
    """Return the expected maximum [P] of k of the N scores, drawn without replacement.

    The i-th smallest score is the maximum of C(i - 1, k - 1) of the C(N, k) draws. With scores of 0
    and 1 this is the unbiased pass@k, 1 - C(N - c, k) / C(N, k) for c correct answers (Chen et al.,
    arXiv 2107.03374, equation 1).
    """
    samples = scores_PN.shape[1]
    shares = np.array([comb(i, k - 1) / comb(samples, k) for i in range(samples)])
    return np.sort(scores_PN, axis=1) @ shares


def pass_at(scores_B: np.ndarray, groups_B: np.ndarray) -> dict[int, float]:
    """Return {k: estimated fraction of prompts that at least one of k samples solves}. Empty unless
    every score is 0 or 1 and every prompt has the same number of samples.
    """
    scores = np.asarray(scores_B, np.float64)
    _, sizes = np.unique(groups_B, return_counts=True)
    is_binary = np.isin(scores, (0.0, 1.0)).all()
    if len(set(sizes.tolist())) != 1 or not is_binary:
        return {}
    samples = int(sizes[0])
    order = np.argsort(groups_B, kind="stable")
    scores_PN = scores[order].reshape(-1, samples)
    found = {}
    for k in numbers_up_to(samples):
        if k > 1:
            found[k] = float(best_of(scores_PN, k).mean())
    return found


def majority(scores: Sequence[float], answers: Sequence[Hashable], k: int) -> float:
    """Return the mean score of the most frequent of k answers, averaged over the blocks of k
    answers and over ties."""
    found = []
    for start in range(0, len(scores) - k + 1, k):
        block = slice(start, start + k)
        votes: dict[Hashable, list[float]] = {}
        for answer, score in zip(answers[block], scores[block], strict=True):
            votes.setdefault(answer, []).append(score)
        most = max(map(len, votes.values()))
        winners = [np.mean(given) for given in votes.values() if len(given) == most]
        found.append(float(np.mean(winners)))
    return float(np.mean(found))


def _answers(extras: Sequence[Mapping[str, Any] | None] | None) -> list[str] | None:
    if not extras:
        return None
    given = [extra or {} for extra in extras]
    for name in _ANSWER:
        if all(name in extra for extra in given):
            return [str(extra[name]) for extra in given]
    return None


def _by_prompt(scores_PN: np.ndarray, answers: list[str]) -> list[tuple[list[float], list[str]]]:
    samples = scores_PN.shape[1]
    starts = range(0, len(answers), samples)
    answers_P = [answers[start : start + samples] for start in starts]
    return list(zip(scores_PN.tolist(), answers_P, strict=True))
