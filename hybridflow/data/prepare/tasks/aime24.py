"""AIME 2024 (math-ai/aime24): the 30 problems of that year's two exams."""

from __future__ import annotations

from functools import partial

from hybridflow.data.prepare.published import BOXED, Published, problem_with_answer, register

convert = partial(problem_with_answer, "aime24")
OPTIONAL = ("answer", "solution")
register(
    "aime24",
    Published("math-ai/aime24", ("problem",), convert, BOXED, splits=("test",), optional=OPTIONAL),
)
