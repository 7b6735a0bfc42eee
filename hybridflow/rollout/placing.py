"""Which engine gets which requests: pure arithmetic over the tokens that each still owes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shares(tokens: Sequence[int], owed: Mapping[int, int]) -> list[int]:
    """The engine of each piece of work, in order.

    Engines are filled one after another up to the level at which all would owe equally much, so
    that pieces that lie together stay together and equal pieces on idle engines are cut as evenly
    as whole pieces allow.

    Args:
        tokens: what each piece may come to.
        owed: what each engine owes already.
    """
    load = dict(owed)
    level = _level(sum(tokens), list(owed.values()))
    chosen = []
    for piece in tokens:
        fits = (number for number, tokens_owed in load.items() if tokens_owed + piece / 2 <= level)
        engine = next(fits, None)
        if engine is None:
            engine = min(load, key=lambda number: load[number])
        load[engine] += piece
        chosen.append(engine)
    return chosen


def _level(added: int, owed: Sequence[int]) -> float:
    """The height that loads reach when `added` is poured over them, lowest first."""
    loads = sorted(owed)
    heights = [(added + sum(loads[:count])) / count for count in range(1, len(loads) + 1)]
    # over the lowest so many, as long as the next of them lies below
    return next(
        height
        for height, above in zip(heights, [*loads[1:], float("inf")], strict=True)
        if height <= above
    )
