"""The page on which two runs answer the same prompts, compared with a plain scan of both dumps."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

from hybridflow.observe.rollouts import dump_path, dump_rollouts, read_rollouts
from hybridflow.observe.watch.answer_pages import SHOWN, AnswerPages
from hybridflow.observe.watch.index import SampleIndex
from hybridflow.observe.watch.query import PER_PAGE
from hybridflow.observe.watch.sample_pages import NotFound

NAMES = ("one", "two")


def write(run: Path, step: int, rng: random.Random, kind: str = "validation") -> None:
    """A dump of 1 to 3 samples for each of 60 out of 80 prompts."""
    prompts = [f"prompt {number}" for number in rng.sample(range(80), 60)]
    prompts = [one for one in prompts for _ in range(rng.randrange(1, 4))]
    rng.shuffle(prompts)
    dump_rollouts(
        dump_path(run / kind, step),
        {
            "step": [step] * len(prompts),
            "uid": list(range(len(prompts))),
            "prompt_text": prompts,
            "response_text": [f"{one} in {run.name} {i}" for i, one in enumerate(prompts)],
            "ground_truth": [f"truth of {one}" for one in prompts],
            "score": [rng.choice([0.0, 1.0, float("nan")]) for _ in prompts],
        },
    )


def pages_of(one: Path, two: Path) -> AnswerPages:
    indices = [SampleIndex(one), SampleIndex(two)]
    for index in indices:
        list(index.refresh())
    return AnswerPages(*indices)


def scanned(run: Path, step: int) -> dict[str, tuple[float | None, str, int]]:
    """Mean score, first answer and number of samples of each prompt."""
    rows = defaultdict(list)
    for row in read_rollouts(dump_path(run / "validation", step)):
        rows[row["prompt_text"]].append(row)
    found = {}
    for prompt, of_prompt in rows.items():
        scores = [row["score"] for row in of_prompt if row["score"] == row["score"]]
        mean = fmean(scores) if scores else None
        found[prompt] = (mean, of_prompt[0]["response_text"], len(of_prompt))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("show", SHOWN)
def test_prompts_are_paired_and_the_largest_differences_come_first(
    tmp_path: Path, seed: int, show: str
) -> None:
    rng = random.Random(seed)
    runs = [tmp_path / name for name in NAMES]
    for run in runs:
        for step in (10, 20):
            write(run, step, rng)
    one = scanned(runs[0], 10)
    two = scanned(runs[1], 20)
    expected = {}
    for prompt in one.keys() & two.keys():
        scores = (one[prompt][0], two[prompt][0])
        gain = None if None in scores else scores[1] - scores[0]  # type: ignore[operator]
        is_shown = {
            "different": bool(gain),
            "better in the second": gain is not None and gain > 0,
            "better in the first": gain is not None and gain < 0,
            "all": True,
        }[show]
        if is_shown:
            expected[prompt] = abs(gain or 0.0)

    pages = pages_of(*runs)
    rows = []
    address = f"kind=validation&step=10&show={show}"
    fields = dict(part.split("=") for part in address.split("&"))
    number = 1
    while True:
        _, _, parts = pages.parts(NAMES, fields | {"page": str(number)})
        rows += parts["rows"]
        assert len(parts["rows"]) <= PER_PAGE
        if not parts["after"]:
            break
        number += 1

    assert [row["prompt_text"] for row in rows] == sorted(
        (row["prompt_text"] for row in rows), key=lambda prompt: -expected[prompt]
    )
    assert len(rows) == len(expected) == len({row["prompt_text"] for row in rows})
    for row in rows:
        prompt = row["prompt_text"]
        assert row["ground_truth"] == f"truth of {prompt}"
        for answer, side in zip(row["answers"], (one, two), strict=True):
            mean, text, count = side[prompt]
            assert (answer["text"], answer["count"]) == (text, count)
            assert answer["score"] == ("–" if mean is None else f"{mean:.3g}")


def test_a_step_without_a_dump_is_said_and_runs_without_a_common_kind_are_refused(
    tmp_path: Path,
) -> None:
    rng = random.Random(1)
    for name in NAMES:
        write(tmp_path / name, 10, rng)
    _, _, parts = pages_of(tmp_path / "one", tmp_path / "two").parts(
        NAMES, {"step": "11", "other_step": "x" * 999, "page": "9" * 30, "show": "?", "kind": ".."}
    )
    assert parts["given"] == {
        "kind": "validation",
        "step": 10,
        "other_step": 10,
        "show": "different",
    }
    assert [line[:30] for line in parts["wrong"]] == [
        "there is no dump of step 11; s",
        "there is no dump of step xxxxx",
    ]
    write(tmp_path / "third", 1, rng, "rollouts")
    with pytest.raises(NotFound, match="no dumps of the same kind"):
        pages_of(tmp_path / "one", tmp_path / "third").parts(NAMES, {})
