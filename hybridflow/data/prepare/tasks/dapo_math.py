"""DAPO-Math-17k (BytedTsinghua-SIA): 17 thousand competition problems with integer answers.
Duplicate rows are dropped."""

from __future__ import annotations

from hybridflow.data.prepare.published import Published, register, rows_of_prompts

COLUMNS = ("data_source", "prompt", "reward_model")
register(
    "dapo_math",
    Published("BytedTsinghua-SIA/DAPO-Math-17k", COLUMNS, rows_of_prompts, splits=("train",)),
)
