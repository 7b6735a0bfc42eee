"""Assignment of requests to engines, based on the number of tokens that each engine still has to
generate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shares(tokens: Sequence[int], owed: Mapping[int, int]) -> list[int]:
    """Assign consecutive pieces of work to engines, and return the engine of each piece. Engines
    are filled to the same load one after another, so that consecutive pieces stay together. On idle
    engines, equal pieces are divided as evenly as possible.

    Args:
        tokens: maximum number of tokens of each piece.
        owed: number of tokens that each engine still has to generate.
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
    """Return the common load of the least loaded engines after `added` tokens are distributed,
    always to the least loaded engine.
    """
    loads = sorted(owed)
    heights = [(added + sum(loads[:count])) / count for count in range(1, len(loads) + 1)]
    # over the smallest `count` loads, as long as the next one is below the level
    return next(
        height
        for height, above in zip(heights, [*loads[1:], float("inf")], strict=True)
        if height <= above
    )
