"""The time of a verifier is linear in the length of a response, whatever a policy repeats in it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from hybridflow.rewards import reading
from hybridflow.rewards.verifiers.base import VERIFIERS
from hybridflow.rewards.verifiers.code import program_of
from hybridflow.rewards.verifiers.judge import read_grade
from tests.unit.growth import grown, holds_up

# what the patterns of the verifiers repeat, alone and behind what begins a match
PIECES = (
    *(
        " ",
        "\n",
        "a",
        "A ",
        "1",
        "1,",
        ".",
        "-",
        "$",
        "*",
        "_",
        "#",
        "`",
        "~",
        "(",
        "{",
        "}",
        "\\",
        "<",
        "[",
        "=",
        ":",
    ),
    *(
        "####",
        "```\n",
        "```python\n",
        "\\boxed{",
        "\\boxed{1} ",
        "\\fbox{",
        "\\text{",
        "\\frac{",
        "\\sqrt",
        "\\{",
    ),
    *(
        "$$",
        "<think>",
        "</think>",
        "\n<think>",
        "<answer>",
        "</answer>",
        "<answer>a</answer>",
        "[THINK]",
        "<|channel|>analysis<|message|>",
        "\\(",
        "\\[",
    ),
    *(
        "\\,",
        "answer ",
        "answer is ",
        "the answer is A or ",
        "option A is wrong ",
        "B is the ",
        "答案",
        "选",
        "答案是",
    ),
    *(
        "Score: ",
        "score",
        "1/2 ",
        "1 2",
        "m2 ",
        "for 2 ",
        "and ",
        "or ",
        "x = ",
        "10^",
        "e5",
        "%",
        "\\pi",
        "元",
        "I ",
    ),
)
STARTS = (
    "",
    "The answer is",
    "\\boxed{",
    "#### ",
    "```python\n",
    "<think>",
    "Score:",
    "<|channel|>final",
)


def _grade(text: str) -> float | None:
    try:
        return read_grade(text)
    except ValueError:
        return None


READ: dict[str, Callable[[str], Any]] = {
    "choice": lambda text: VERIFIERS.get("choice").function(text, "B"),
    "gsm8k": lambda text: VERIFIERS.get("gsm8k").function(text, "7", flexible=True),
    "format": lambda text: VERIFIERS.get("format").function(text, None),
    "question": lambda text: VERIFIERS.get("question").function(text, {"target": "a"}),
    "exact": lambda text: VERIFIERS.get("exact").function(text, "7"),
    "math": lambda text: VERIFIERS.get("math").function(text, "7", comparison_s=1000.0),
    "program": program_of,
    "judge": _grade,
    "blocks": reading.fenced_blocks,
    "response": reading.read_response,
}
LENGTH = 5_000


def frames(starts: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [(start, piece, "") for start, piece in itertools.product(starts, PIECES)]


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_time_grows_no_faster_than_the_text(name: str) -> None:
    assert not grown(READ[name], frames(STARTS[:2]), LENGTH)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_time_grows_no_faster_than_a_long_text_whatever_it_begins_with(name: str) -> None:
    assert not grown(READ[name], frames(STARTS), 8 * LENGTH)


def fuzzed(draw: random.Random, length: int) -> str:
    pieces = [draw.choice(PIECES + STARTS) * draw.choice((1, 1, 3, 1000)) for _ in range(12)]
    text = "".join(pieces)
    return (text * (length // max(len(text), 1) + 1))[:length]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in VERIFIERS.names() if VERIFIERS.get(name).runs_in_driver]
)
def test_what_runs_in_the_driver_does_not_hold_it_up(name: str) -> None:
    """10,000 responses of 100,000 characters, each within 50 ms of processor time."""
    draw = random.Random(name)
    slow = [
        text
        for text in (fuzzed(draw, 100_000) for _ in range(10_000))
        if holds_up(READ[name], text)
    ]
    assert not slow, (len(slow), slow[0][:200])
