"""The parser of LaTeX that math-verify uses, with the cheaper of ANTLR's two kinds of prediction
first.

ANTLR predicts with the full context of a decision (LL), which it computes anew for each decision of
each text, or without it (SLL), from a table that grows with use. Its manual (`PredictionMode.SLL`)
promises that a text which SLL accepts has the same tree with LL. A text that SLL refuses is read
again with LL.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cheap_prediction() -> Iterator[None]:
    """Within this context, texts that math-verify reads are read with SLL first."""
    from latex2sympy2_extended import latex2sympy2

    before = latex2sympy2.PSParser
    latex2sympy2.PSParser = parser()
    try:
        yield
    finally:
        latex2sympy2.PSParser = before


@functools.cache
def parser() -> type[Any]:
    """The class of parsers that read with SLL first. Its tables are apart from those of LL."""
    from antlr4.atn.ParserATNSimulator import ParserATNSimulator
    from antlr4.atn.PredictionMode import PredictionMode
    from antlr4.dfa.DFA import DFA
    from latex2sympy2_extended.antlr_parser import PSParser

    tables = [DFA(state, number) for number, state in enumerate(PSParser.atn.decisionToState)]

    class Parser(PSParser):
        """Its error listener is expected to raise, which ends a reading at the first error."""

        def math(self) -> Any:
            """The tree of the whole text."""
            # a text with a character that is no token ends here, and is not read twice
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
