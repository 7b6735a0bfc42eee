"""The time in which calls are read is linear in the length of an answer, whatever a policy repeats
in it.

What is repeated are runs of pieces of a call as the format writes it; a new format is tried as it
is registered.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hybridflow.agents.call_reading import read_calls
from hybridflow.agents.formats.base import FORMATS
from tests.unit.agents.written_calls import DECLARED, TAGS, WRITTEN
from tests.unit.growth import grown, holds_up

PIECE = re.compile(r"</?[^<>\s]*+>|\w+|\s+|.", re.DOTALL)
COMMON = (
    " ",
    "\n",
    "a",
    "<",
    ">",
    "{",
    "[",
    '"',
    "\\",
    '"a",',
    '{"a":',
    "</think>",
    "\n<think>",
    "<think>",
    "1",
    "\t",
    "```",
    "'",
)
LENGTH = 5_000
EVERY = {**WRITTEN, "tags": TAGS}


def reader(name: str) -> Callable[[str], Any]:
    return lambda text: read_calls(name, text, DECLARED)


def pieces_of(name: str) -> list[str]:
    """A call of this format, cut where words, tags and signs begin."""
    frame, write = EVERY[name]
    return PIECE.findall(frame.replace("{}", write("search", {"query": "x", "limit": 1})))


def frames(name: str, most: int, ends: Sequence[bool]) -> list[tuple[str, str, str]]:
    """Each beginning of a call, behind it runs of up to `most` of its pieces or a common piece, and
    what is left of the call, or nothing."""
    pieces = pieces_of(name)
    runs = {
        "".join(pieces[at : at + size]) for size in range(1, most + 1) for at in range(len(pieces))
    }
    begun = [("".join(pieces[:at]), "".join(pieces[at:])) for at in range(len(pieces) + 1)]
    return [
        (start, run, rest if ended else "")
        for ended in ends
        for start, rest in begun
        for run in itertools.chain(COMMON, sorted(runs))
    ]


def drawn(name: str, most: int, number: int) -> list[tuple[str, str, str]]:
    some = frames(name, most, (True, False))
    return random.Random(name).sample(some, min(len(some), number))


def test_each_format_has_a_written_call() -> None:
    assert set(EVERY) == set(FORMATS.names())


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS.names())
def test_time_grows_no_faster_than_the_answer(name: str) -> None:
    assert not grown(reader(name), drawn(name, 2, 600), LENGTH)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS.names())
def test_time_grows_no_faster_than_a_long_answer_wherever_it_repeats(name: str) -> None:
    assert not grown(reader(name), drawn(name, 6, 3_000), 2 * LENGTH)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS.names())
def test_reading_calls_does_not_hold_the_driver_up(name: str) -> None:
    """1,000 answers of 100,000 characters, each within 50 ms of processor time."""
    draw = random.Random(name)
    some = frames(name, 6, (True,))
    slow = []
    for _ in range(1_000):
        parts = [
            start + run * draw.choice((1, 3, 1000)) + rest
            for start, run, rest in draw.choices(some, k=6)
        ]
        text = "".join(parts)
        text = (text * (100_000 // len(text) + 1))[:100_000]
        if holds_up(reader(name), text):
            slow.append(text)
    assert not slow, (len(slow), slow[0][:200])
