"""Values of an index that do not belong there."""

from __future__ import annotations

import json
import random
from typing import Any


def lie_about(value: Any, drawn: random.Random) -> None:
    """Exchange, repeat, shift, leave out or replace something in an index."""
    kind = drawn.choice(["value", "value", "exchange", "repeat", "leave out", "shift"])
    rows = value[drawn.choice(["chunks", "hf"])]
    if kind == "exchange":
        one, two = drawn.sample(places(value), 2)
        if one != two[: len(one)] and two != one[: len(two)]:
            first = _get(value, one)
            second = _get(value, two)
            put(value, one, second)
            put(value, two, first)
    elif kind == "repeat" and rows:
        rows.append(json.loads(json.dumps(drawn.choice(rows))))
    elif kind == "leave out" and rows:
        rows.pop(drawn.randrange(len(rows)))
    elif kind == "shift":
        chunk = drawn.choice(value["chunks"] or [{"start": 0, "offset": 0}])
        if isinstance(chunk, dict) and isinstance(chunk.get("offset"), int):
            chunk["offset"] += drawn.choice([-96, -4, 4, 96])
    else:
        lies: list[object] = [
            -1,
            1 << 70,
            1 << 61,
            float("nan"),
            0.0,
            None,
            "",
            "\x1b[2J",
            [],
            [0, 0],
            {},
            True,
        ]
        put(value, drawn.choice(places(value)), drawn.choice(lies))


def _get(value: Any, place: tuple[Any, ...]) -> Any:
    for name in place:
        value = value[name]
    return value


def places(value: object) -> list[tuple[object, ...]]:
    """The way to each value inside of the lists and objects."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [(name, *rest) for name, inner in items for rest in ((), *places(inner))]


def put(value: Any, place: tuple[Any, ...], lie: object) -> None:
    for name in place[:-1]:
        value = value[name]
    value[place[-1]] = lie
