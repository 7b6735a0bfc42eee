"""The bench of graders: responses that were judged by hand, each with why, for every verifier
(`tests/golden/graders`).

Files ending in `_blind` were written before the verifiers were read, the others with them and
reports of their mistakes at hand. Nothing wrong may be paid, since a policy would find it; of what
is right at most 1% may be missed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.rewards.verifiers.base import VERIFIERS
from hybridflow.rewards.verifiers.judge import read_grade

FOLDER = Path(__file__).parents[2] / "golden" / "graders"
KINDS = ("choice", "code", "format", "gsm8k", "judge", "math")


def pairs(kind: str) -> list[tuple[Any, ...]]:
    """(the verifier's arguments, its options, the score that is right, why) of each case of a
    kind."""
    rows = [
        row
        for file in sorted(FOLDER.glob(f"{kind}_*.yaml"))
        for row in yaml.safe_load(file.read_text("utf-8"))
    ]
    if kind == "code":
        return [((row["said"], row["truth"]), {}, row["pays"], row["why"]) for row in rows]
    if kind == "gsm8k":
        return [
            ((said, truth), {"flexible": flexible}, float(right[flexible]), why)
            for said, truth, right, why in rows
            for flexible in (False, True)
        ]
    if kind == "format":
        return [
            ((said, None), {"thinking_open": opened}, float(right), why)
            for said, opened, right, why in rows
        ]
    if kind == "judge":
        return [
            ((said,), {}, None if grade is None else float(grade), why) for said, grade, why in rows
        ]
    return [((said, truth), {}, float(right), why) for said, truth, right, why in rows]


def judged(kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> float | None:
    if kind == "judge":
        try:
            return read_grade(*arguments)
        except ValueError:
            return None
    return float(VERIFIERS.get(kind).function(*arguments, **options).score)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] if kind == "math" else []) for kind in KINDS],
)
def test_what_is_wrong_is_not_paid_and_what_is_right_is(kind: str) -> None:
    cases = pairs(kind)
    found = [
        (judged(kind, arguments, options), right, arguments, why)
        for arguments, options, right, why in cases
    ]
    paid = [case for case in found if (case[0] or 0) > (case[1] or 0)]
    missed = [case for case in found if (case[0] or 0) < (case[1] or 0)]
    assert not paid, f"{len(paid)} of {len(cases)} are paid that are not right: {paid[:5]}"
    right = sum(bool(case[1]) for case in found)
    assert len(missed) <= right / 100, (
        f"{len(missed)} of {right} right ones are missed: {missed[:5]}"
    )


def test_the_bench_is_as_large_as_the_documentation_says() -> None:
    counts = {
        file.stem: len(yaml.safe_load(file.read_text("utf-8"))) for file in FOLDER.glob("*.yaml")
    }
    blind = sum(count for name, count in counts.items() if name.endswith("_blind"))
    assert sum(counts.values()) >= 600 and 3 * blind >= sum(counts.values())


def test_a_ground_truth_counts_as_a_right_answer_to_itself() -> None:
    truths = {str(arguments[1]) for arguments, *_ in pairs("math")}
    refused = [truth for truth in truths if judged("math", (f"\\boxed{{{truth}}}", truth), {}) != 1]
    assert not refused
