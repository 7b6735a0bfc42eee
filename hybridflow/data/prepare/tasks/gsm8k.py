"""GSM8K (openai/gsm8k): grade-school word problems, with a byte-level tokenizer for models with
random weights."""

from __future__ import annotations

from hybridflow.data.files import Row
from hybridflow.data.prepare.published import Prompt, Published, register

SOURCE = "openai/gsm8k"
INSTRUCTION = 'Think step by step, then give the final answer after "####".'
_MARK = "####"


def convert(row: Row) -> Prompt:
    """Convert a row {question, answer} in which the answer ends with "#### 1,234"."""
    _, found, final = row.text("answer").rpartition(_MARK)
    if not found or not final.strip():
        raise row.malformed("answer", f'text with the final answer after "{_MARK}"')
    return Prompt(SOURCE, row.text("question"), final.strip().replace(",", ""))


register(
    "gsm8k",
    Published(SOURCE, ("question", "answer"), convert, INSTRUCTION, subset="main"),
    tokenizer=True,
)
