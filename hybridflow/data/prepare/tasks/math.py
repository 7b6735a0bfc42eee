r"""MATH (DigitalLearningGmbH/MATH-lighteval): competition problems, with the answer in the last
\boxed{} of the solution."""

from __future__ import annotations

from functools import partial

from hybridflow.data.prepare.published import BOXED, Published, problem_with_answer, register

SOURCE = "DigitalLearningGmbH/MATH-lighteval"
convert = partial(problem_with_answer, SOURCE)
register("math", Published(SOURCE, ("problem", "solution"), convert, BOXED, subset="data"))
