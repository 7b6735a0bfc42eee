"""AIME 2025 (math-ai/aime25): the 30 problems of that year's two exams."""

from __future__ import annotations

from functools import partial

from hybridflow.data.prepare.published import BOXED, Published, problem_with_answer, register

convert = partial(problem_with_answer, "aime25")
OPTIONAL = ("answer", "solution")
register(
    "aime25",
    Published("math-ai/aime25", ("problem",), convert, BOXED, splits=("test",), optional=OPTIONAL),
)
