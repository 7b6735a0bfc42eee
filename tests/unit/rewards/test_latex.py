"""Texts that are read with ANTLR's cheaper prediction first have the trees that math-verify's own
parser gives them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.antlr_parser import PSParser

from hybridflow.rewards.latex import cheap_prediction

TERMS = (
    *(
        "1",
        "-2",
        "3.5",
        "1,000",
        "x",
        "a_1",
        "x^2",
        "x^{n+1}",
        "n!",
        "\\pi",
        "\\infty",
        "i",
        "50\\%",
        "30^\\circ",
    ),
    *(
        "\\frac{1}{2}",
        "\\frac{x+1}{y}",
        "\\dfrac12",
        "\\sqrt{2}",
        "\\sqrt[3]{x}",
        "\\sin x",
        "\\log_2 8",
        "f(x)",
    ),
    *(
        "\\binom{5}{2}",
        "|x-1|",
        "\\{1,2\\}",
        "(0,1)",
        "[0,1)",
        "\\left(-\\infty,3\\right]",
        "\\emptyset",
        "e^{i\\pi}",
    ),
    *(
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\int_0^1 x dx",
        "\\sum_{i=1}^{n} i",
        "\\lim_{x\\to 0} x",
    ),
    *("\\text{yes}", "\\frac{d}{dx} x^2", "\\lfloor x\\rfloor"),
)
SIGNS = (
    "+",
    "-",
    "*",
    "/",
    "\\cdot ",
    "=",
    "<",
    "\\le ",
    "\\ne ",
    ",",
    " ",
    ";",
    "\\cup ",
    "\\in ",
    "^",
    "_",
)


def tree(text: str) -> Any:
    """The rules and tokens of a text, or None where it is refused."""
    try:
        return _of(latex2sympy2._Latex2Sympy().create_parser(text).math())
    except Exception:
        return None


def _of(node: Any) -> Any:
    children = [_of(node.getChild(number)) for number in range(node.getChildCount())]
    return (type(node).__name__, *children) if children else node.getText()


def compared(count: int, seed: int) -> int:
    """Compares the trees of as many texts; returns how many are well formed."""
    draw = random.Random(seed)
    found = 0
    for _ in range(count):
        text = draw.choice(TERMS)
        for _ in range(draw.randint(0, 3)):
            text += draw.choice(SIGNS) + draw.choice(TERMS)
        if draw.random() < 0.1:
            text = text[: draw.randint(1, len(text))]
        exact = tree(text)
        with cheap_prediction():
            assert tree(text) == exact, text
        found += exact is not None
    return found


@pytest.mark.slow
def test_trees_are_those_of_the_exact_prediction() -> None:
    assert 30 < compared(100, seed=1) < 90


@pytest.mark.slow
@pytest.mark.full
def test_trees_are_those_of_the_exact_prediction_for_3000_texts() -> None:
    assert 900 < compared(3000, seed=0) < 2700


def test_the_parser_of_others_is_as_before_also_after_an_error() -> None:
    with pytest.raises(ValueError, match="some error"), cheap_prediction():
        assert issubclass(latex2sympy2.PSParser, PSParser) and latex2sympy2.PSParser is not PSParser
        raise ValueError("some error")
    assert latex2sympy2.PSParser is PSParser


@pytest.mark.parametrize("text", ["1 \\unknowncommand# 2", "1 + ~", "\\frac{1}{2", "#", ""])
def test_what_is_refused_is_refused(text: str) -> None:
    assert tree(text) is None
    with cheap_prediction():
        assert tree(text) is None
