"""NQ and HotpotQA as preprocessed for Search-R1 (PeterJinGo/nq_hotpotqa_train): questions to answer
with a search tool."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.data.files import Row
from hybridflow.data.prepare.published import Prompt, Published, register, rows_of_prompts

COLUMNS = ("data_source", "prompt", "reward_model")
_PREFIX = "searchR1_"


def convert(row: Row) -> Prompt:
    """Convert a row. Its ground_truth becomes {target: [accepted answers]}."""
    prompt = rows_of_prompts(row)
    target = prompt.ground_truth.get("target") if isinstance(prompt.ground_truth, dict) else None
    if not isinstance(target, (str, list)) or not target:
        raise row.malformed("reward_model", "a ground_truth {target: answers}")
    answers = [target] if isinstance(target, str) else list(map(str, target))
    source = prompt.data_source
    source = source if source.startswith(_PREFIX) else f"{_PREFIX}{source}"
    return replace(
        prompt, data_source=source, ground_truth={"target": answers}, ability="fact-reasoning"
    )


register("search_r1", Published("PeterJinGo/nq_hotpotqa_train", COLUMNS, convert))
