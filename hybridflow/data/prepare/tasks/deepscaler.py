"""DeepScaleR-Preview (agentica-org): 40,000 competition problems with answers."""

from __future__ import annotations

from functools import partial

from hybridflow.data.prepare.published import BOXED, Published, problem_with_answer, register

SOURCE = "agentica-org/DeepScaleR-Preview-Dataset"
convert = partial(problem_with_answer, "math")
register("deepscaler", Published(SOURCE, ("problem", "answer"), convert, BOXED, splits=("train",)))
