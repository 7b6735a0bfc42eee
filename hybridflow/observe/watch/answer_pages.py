"""The page on which two runs answer the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.observe.watch.index import SampleIndex, Samples
from hybridflow.observe.watch.query import page_number
from hybridflow.observe.watch.sample_pages import NotFound, Parts, one_page, text_of, texts_of

_PREFERRED = "validation"  # both runs answer the same held-out prompts
SHOWN = ("different", "better in the second", "better in the first", "all")


@dataclass(frozen=True)
class _Step:
    """The prompts of one dump.

    Attributes:
        prompts: their hashes, ascending and distinct.
        scores: the mean score of each prompt's samples; NaN if none has a score.
        first: the first sample of each prompt, as an index into the snapshot.
        counts: the number of samples of each prompt.
    """

    samples: Samples
    step: int
    prompts: np.ndarray
    scores: np.ndarray
    first: np.ndarray
    counts: np.ndarray


class AnswerPages:
    """Builds the page from the indices of both runs."""

    def __init__(self, one: SampleIndex, two: SampleIndex) -> None:
        self._indices = (one, two)

    def parts(self, names: tuple[str, str], fields: Mapping[str, str]) -> Parts:
        """Return the content of the page. `names` are the names of the runs.

        Raises:
            NotFound: the runs have no dumps of the same kind.
        """
        one, two = (index.samples for index in self._indices)
        kinds = [kind for kind in one.kinds if kind in two.kinds]
        if not kinds:
            raise NotFound("The two runs have no dumps of the same kind yet.")
        default = _PREFERRED if _PREFERRED in kinds else kinds[0]
        kind = _choice(fields.get("kind", ""), kinds, default)
        show = _choice(fields.get("show", ""), SHOWN, SHOWN[0])
        wrong: list[str] = []
        first = _of_step(one, kind, fields.get("step", ""), wrong)
        second = _of_step(two, kind, fields.get("other_step", ""), wrong)
        given = {"kind": kind, "step": first.step, "other_step": second.step, "show": show}
        parts = _answers((first, second), given, page_number(fields))
        parts |= {"names": names, "kinds": kinds, "choices": SHOWN, "given": given, "wrong": wrong}
        return "watch_answers", "Answers of both runs", parts


def _choice(given: str, choices: Sequence[str], default: str) -> str:
    return given if given in choices else default


def _answers(
    sides: tuple[_Step, _Step], given: Mapping[str, Any], wanted_page: int
) -> dict[str, Any]:
    """Return the values for one page of the prompts that both dumps contain."""
    first, second = sides
    _, *places = np.intersect1d(first.prompts, second.prompts, return_indices=True)
    scores = [side.scores[at] for side, at in zip(sides, places, strict=True)]
    gain = scores[1] - scores[0]
    found = _sorted(gain, given["show"])
    shown, pages = one_page(found, wanted_page, "answers", given)
    return {
        "summary": _summary(gain),
        "means": list(map(_mean, scores)),
        "rows": _rows(sides, places, shown),
        **pages,
    }


def _of_step(samples: Samples, kind: str, given: str, wrong: list[str]) -> _Step:
    """Return the prompts of the step given in the address, or of the latest dump. If the run has no
    dump of that step, a sentence is added to `wrong`."""
    of_kind = samples.kind == samples.kinds.index(kind)
    steps = np.unique(samples.step[of_kind])
    step = int(steps[-1]) if len(steps) else 0
    given = given.strip()
    if given in map(str, steps.tolist()):
        step = int(given)
    elif given:
        wrong.append(f"there is no dump of step {given[:40]}; step {step} is shown")
    prompt_of = samples.columns["prompt"]
    members = np.flatnonzero(of_kind & (samples.step == step) & (prompt_of > 0))
    prompts, first, of_row = np.unique(prompt_of[members], return_index=True, return_inverse=True)
    size = len(prompts)
    scores = samples.columns["score"][members]
    is_scored = ~np.isnan(scores)
    of_score = of_row[is_scored]
    scored = np.bincount(of_score, minlength=size)
    sums = np.bincount(of_score, scores[is_scored], size)
    means = np.full(size, np.nan)
    np.divide(sums, scored, out=means, where=scored > 0)
    return _Step(
        samples=samples,
        step=step,
        prompts=prompts,
        scores=means,
        first=members[first],
        counts=np.bincount(of_row, minlength=size),
    )


def _sorted(gain: np.ndarray, wanted: str) -> np.ndarray:
    """Return the indices of the prompts to show, largest difference first."""
    kept = {
        "different": (gain != 0) & ~np.isnan(gain),
        "better in the second": gain > 0,
        "better in the first": gain < 0,
        "all": np.ones(len(gain), bool),
    }[wanted]
    found = np.flatnonzero(kept)
    sizes = np.abs(np.nan_to_num(gain[found]))
    return found[np.argsort(-sizes, kind="stable")]


def _summary(gain: np.ndarray) -> str:
    better = np.count_nonzero(gain > 0)
    worse = np.count_nonzero(gain < 0)
    equal = np.count_nonzero(gain == 0)
    return (
        f"{len(gain):,} prompts in both dumps: {better:,} better in the second, "
        f"{worse:,} better in the first, {equal:,} equal"
    )


def _rows(sides: tuple[_Step, _Step], places: list[np.ndarray], shown: np.ndarray) -> list[Any]:
    rows: list[dict[str, Any]] = [{"answers": []} for _ in shown]
    for side, at in zip(sides, places, strict=True):
        numbers = at[shown]
        chosen = side.first[numbers]
        texts = texts_of(side.samples, chosen)
        for row, sample, number in zip(rows, chosen.tolist(), numbers.tolist(), strict=True):
            text = texts[sample]
            answer = {
                "score": _mean(side.scores[number : number + 1]),
                "count": int(side.counts[number]),
                "text": text_of(text, "response_text"),
            }
            row.setdefault("prompt_text", text_of(text, "prompt_text"))
            row.setdefault("ground_truth", text_of(text, "ground_truth"))
            row["answers"].append(answer)
    return rows


def _mean(scores: np.ndarray) -> str:
    known = scores[~np.isnan(scores)]
    return f"{known.mean():.3g}" if len(known) else "–"
