"""The code rows of Eurus-2-RL-Data (PRIME-RL): programming problems with tests, run in the
sandbox."""

from __future__ import annotations

import json
from dataclasses import replace

from hybridflow.data.files import Row
from hybridflow.data.prepare.published import Prompt, Published, register, rows_of_prompts

COLUMNS = ("data_source", "prompt", "ability", "reward_model")


def convert(row: Row) -> Prompt | None:
    """Convert a row with ability `code` and ground truth JSON {inputs, outputs, fn_name?}. Returns
    None for other abilities and for rows without tests."""
    if row.text("ability") != "code":
        return None
    prompt = rows_of_prompts(row)
    try:
        tests = json.loads(prompt.ground_truth)
        is_whole = len(tests["inputs"]) == len(tests["outputs"]) > 0
    except (ValueError, TypeError, KeyError) as error:
        raise row.malformed(
            "reward_model", "a ground_truth that is JSON {inputs, outputs}"
        ) from error
    return replace(prompt, ability="code") if is_whole else None


register("eurus2_code", Published("PRIME-RL/Eurus-2-RL-Data", COLUMNS, convert))
