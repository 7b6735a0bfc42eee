"""MATH-500 (HuggingFaceH4): 500 held-out problems from MATH."""

from __future__ import annotations

from functools import partial

from hybridflow.data.prepare.published import BOXED, Published, problem_with_answer, register

SOURCE = "HuggingFaceH4/MATH-500"
convert = partial(problem_with_answer, SOURCE)
register("math500", Published(SOURCE, ("problem", "answer"), convert, BOXED, splits=("test",)))
