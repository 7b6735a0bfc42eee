"""How the time of a function grows with the length of a text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

FLOOR_S = 0.01  # what takes less takes no time
BUDGET_S = 0.05  # of what the driver does at a time
_WORSE = 2.2**2  # how much longer four times the length may take


def seconds(function: Callable[[str], Any], text: str) -> float:
    """Processor time, the least of three calls where it is over `FLOOR_S`."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        function(text)
        best = min(best, time.process_time() - began)
        if best < FLOOR_S:
            break
    return best


def holds_up(function: Callable[[str], Any], text: str) -> bool:
    """Whether it takes more than `BUDGET_S` of processor time, each of 18 times. Where other
    programs share caches and cores, a call takes longer, but not every one."""
    return all(seconds(function, text) > BUDGET_S for _ in range(6))


def growth(function: Callable[[str], Any], short: str, long: str) -> float:
    """How much longer the long text takes; 0 where it takes no time."""
    took = seconds(function, long)
    return took / max(seconds(function, short), FLOOR_S / 5) if took > FLOOR_S else 0.0


def repeated(frames: Iterable[tuple[str, str, str]], length: int) -> Iterator[tuple[str, str]]:
    """A name and a text of about this length for each beginning, repeated piece and end."""
    for start, piece, end in frames:
        yield f"{start!r} {piece!r} {end!r}", start + piece * (length // len(piece)) + end


def grown(
    function: Callable[[str], Any], frames: list[tuple[str, str, str]], length: int
) -> list[tuple[str, float]]:
    """The texts for which four times the length takes more than 2.2 times 2.2 as long, and how much
    longer.

    What is found is measured again, and with four times that length too: where a text outgrows a
    cache of the processor its time jumps once, while a power of the length shows at both steps.
    """
    found = []
    texts = zip(*(repeated(frames, length * times) for times in (1, 4, 16)), strict=True)
    for (what, short), (_, long), (_, longest) in texts:
        ratio = growth(function, short, long)
        if ratio > _WORSE:
            ratio = min(ratio, *(growth(function, short, long) for _ in range(4)))
        if ratio > _WORSE:
            ratio = min(ratio, growth(function, long, longest))
        if ratio > _WORSE:
            found.append((what, ratio))
    return found
