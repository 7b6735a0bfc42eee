"""HumanEval (openai/openai_humaneval): Python functions to complete, verified by running the calls
in their tests' assertions."""

from __future__ import annotations

import json

from hybridflow.data.files import Row
from hybridflow.data.prepare.published import Prompt, Published, calls_of, register

_ASK = (
    "Complete this Python function. Give the whole function, with its imports, in one fenced "
    "block.\n```python\n"
)


def convert(row: Row) -> Prompt | None:
    """Convert a row {prompt, test, entry_point}. Returns None if a test does not compare a call
    with a plain value."""
    found = calls_of(row.text("test"), ("candidate",))
    if found is None:
        return None
    truth = json.dumps(
        {"fn_name": row.text("entry_point"), "inputs": found[1], "outputs": found[2]}
    )
    return Prompt("humaneval", f"{_ASK}{row.text('prompt').strip()}\n```", truth, "code")


COLUMNS = ("prompt", "test", "entry_point")
register("humaneval", Published("openai/openai_humaneval", COLUMNS, convert, splits=("test",)))
