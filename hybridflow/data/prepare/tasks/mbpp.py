"""MBPP (google-research-datasets/mbpp): short Python functions to write, verified by running the
calls in their tests' assertions."""

from __future__ import annotations

import json

from hybridflow.data.files import Row
from hybridflow.data.prepare.published import Prompt, Published, calls_of, register

_ASK = "Write the Python function in one fenced block. It must pass this test:"


def convert(row: Row) -> Prompt | None:
    """Convert a row {text, test_list}. Returns None if a test does not compare a call with a plain
    value."""
    tests = row.values["test_list"]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise row.malformed("test_list", "a list of assertions")
    found = calls_of("\n".join(tests), ())
    if found is None:
        return None
    function, given, wanted = found
    truth = json.dumps({"fn_name": function, "inputs": given, "outputs": wanted})
    return Prompt("mbpp", f"{row.text('text')} {_ASK}\n{tests[0]}", truth, "code")


register(
    "mbpp",
    Published("google-research-datasets/mbpp", ("text", "test_list"), convert, subset="full"),
)
