"""Pairs of a ground truth and an answer in many notations, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator


def pairs(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yields (ground truth, response): about half of the answers are the ground truth in another
    notation."""
    draw = random.Random(seed)
    kinds = (_number, _power, _interval, _set, _polynomial)
    frames = (
        "So the answer is $\\boxed{%s}$.",
        "We get $%s$",
        "\\boxed{%s}",
        "The final answer is $%s$. I hope it is right.",
    )
    for _ in range(count):
        kind = draw.choice(kinds)
        values = draw.randint(-50, 50), draw.randint(2, 20)
        others = values if draw.random() < 0.5 else (draw.randint(-50, 50), draw.randint(2, 20))
        yield kind(draw, *values), draw.choice(frames) % kind(draw, *others)


def _number(draw: random.Random, a: int, b: int) -> str:
    forms = (
        f"\\frac{{{a}}}{{{b}}}",
        f"{a}/{b}",
        f"{a / b}",
        f"\\dfrac{{{2 * a}}}{{{2 * b}}}",
        f"{a} \\div {b}",
    )
    return draw.choice(forms)


def _power(draw: random.Random, a: int, b: int) -> str:
    return draw.choice(
        (
            f"{b}\\sqrt{{{abs(a) + 1}}}",
            f"\\sqrt{{{b * b * (abs(a) + 1)}}}",
            f"{b}*({abs(a) + 1})^{{1/2}}",
        )
    )


def _interval(draw: random.Random, a: int, b: int) -> str:
    return draw.choice(
        (f"({a}, {a + b}]", f"({a},{a + b}]", f"\\left({a}, {2 * a + 2 * b}/2\\right]")
    )


def _set(draw: random.Random, a: int, b: int) -> str:
    return draw.choice((f"\\{{{a}, {a + b}\\}}", f"\\{{{a + b}, {a}\\}}"))


def _polynomial(draw: random.Random, a: int, b: int) -> str:
    return draw.choice((f"x^2 + {b}x", f"x(x + {b})", f"{b}x + x^2"))
