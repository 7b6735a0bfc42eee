"""A variant of math-verify's LaTeX parser that tries the cheaper of ANTLR's two prediction modes
first.

ANTLR predicts either with the full context of a decision (LL), recomputed for each decision, or
without it (SLL), from a table that grows with use. Its manual (`PredictionMode.SLL`) guarantees
that if SLL accepts a text, LL produces the same tree. Texts that SLL rejects are re-parsed with LL.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cheap_prediction() -> Iterator[None]:
    """Context manager that makes math-verify try SLL first."""
    from latex2sympy2_extended import latex2sympy2

    before = latex2sympy2.PSParser
    latex2sympy2.PSParser = parser()
    try:
        yield
    finally:
        latex2sympy2.PSParser = before


@functools.cache
def parser() -> type[Any]:
    """Return the parser class that tries SLL first. Its tables are separate from those used by
    LL."""
    from antlr4.atn.ParserATNSimulator import ParserATNSimulator
    from antlr4.atn.PredictionMode import PredictionMode
    from antlr4.dfa.DFA import DFA
    from latex2sympy2_extended.antlr_parser import PSParser

    tables = [DFA(state, number) for number, state in enumerate(PSParser.atn.decisionToState)]

    class Parser(PSParser):
        """A parser that stops at the first error. Requires an error listener that raises."""

        def math(self) -> Any:
            """Parse the whole text as one mathematical expression."""
            # a text with an invalid character fails here, and is not parsed twice
            self._input.fill()
            exact: Any = self._interp
            cheap = ParserATNSimulator(self, self.atn, tables, self.sharedContextCache)
            cheap.predictionMode = PredictionMode.SLL
            self._interp: Any = cheap
            try:
                return super().math()
            except Exception:
                self._interp = exact
                self.reset()
                return super().math()

    return Parser
