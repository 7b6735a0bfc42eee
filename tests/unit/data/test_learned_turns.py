"""Whole conversations: which tokens are learned, and that all are those of the chat template."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config.schema_data import DataConfig, SftConfig
from hybridflow.data.conversations import LearnedRow, learned_rows
from hybridflow.data.dataset import SftDataset
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from tests.unit.data.chat_tokenizers import TEMPLATES, tokenizer_with

CONVERSATION = [
    {"role": "user", "content": "hello?"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "second"},
]
# what ends an answer in the templates that show all answers behind the prompts that ask for them,
# whatever follows
ENDS = {
    "ByteDance-Seed-OSS": "<seed:eos>",
    "HuggingFaceTB-SmolLM3-3B": "<|im_end|>",
    "MiMo-VL": "<|im_end|>",
    "Qwen-Qwen2.5-7B-Instruct": "<|im_end|>",
    "Qwen3-Coder": "<|im_end|>",
    "deepseek-ai-DeepSeek-V3.1": "<｜end▁of▁sentence｜>",
    "ibm-granite-granite-3.3-2B-Instruct": "<|end_of_text|>",
    "ibm-granite-granite-4.0": "<|end_of_text|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>",
    "mistralai-Ministral-3-14B-Reasoning-2512": "<|endoftext|>",
    "mistralai-Mistral-Nemo-Instruct-2407": "<|endoftext|>",
    "moonshotai-Kimi-K2": "<|im_end|>",
}
# of the others what is learned of each row
LEARNED = {
    "Apertus-8B-Instruct": [["first<|assistant_end|>", "second<|endoftext|>"]],
    "GLM-4.6": [["\n<think></think>\nfirst<|user|>", "\n<think></think>\nsecond<|endoftext|>"]],
    "Qwen-Qwen3-0.6B": [
        [f"<think>\n\n</think>\n\n{answer}<|im_end|>"] for answer in ("first", "second")
    ],
    "Qwen3.5-4B": [[f"</think>\n\n{answer}<|im_end|>"] for answer in ("first", "second")],
    "StepFun3.5-Flash": [[f"</think>\n{answer}<|im_end|>"] for answer in ("first", "second")],
    "openai-gpt-oss-120b": [
        [f"<|channel|>final<|message|>{answer}<|return|>"] for answer in ("first", "second")
    ],
}
# these show an answer without the thinking that their prompt has opened
REFUSED = {
    "GLM-4.7-Flash",
    "MiniMax-M2",
    "Qwen-QwQ-32B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.2",
}


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(
        tokenizer._hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def learned(tokenizer: Tokenizer, row: LearnedRow) -> list[str]:
    """The texts that are learned, each from its first token to its last."""
    runs = [
        list(run)
        for wanted, run in groupby(zip(row.ids, row.learned, strict=True), lambda one: one[1])
        if wanted
    ]
    return [text_of(tokenizer, [token for token, _ in run]) for run in runs]


def whole(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """The oracle: transformers' own rendering, and the tokens of all of it."""
    text = tokenizer._hf.apply_chat_template(messages, tokenize=False)
    return list(tokenizer._hf.encode(text, add_special_tokens=False))


def test_every_template_is_known_here() -> None:
    assert {*ENDS, *LEARNED, *REFUSED} == set(TEMPLATES)


@pytest.mark.parametrize("name", ENDS)
def test_answers_and_their_ends_are_learned_of_the_tokens_of_the_template(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    [row] = learned_rows(tokenizer, CONVERSATION, None, None)
    assert row.ids == whole(tokenizer, CONVERSATION)
    assert learned(tokenizer, row) == [f"first{ENDS[name]}", f"second{ENDS[name]}"]


@pytest.mark.parametrize("name", LEARNED)
def test_an_answer_that_is_written_otherwise_later_has_a_row_of_its_own(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    rows = learned_rows(tokenizer, CONVERSATION, None, None)
    assert [learned(tokenizer, row) for row in rows] == LEARNED[name]
    for row, length in zip(rows, (4,) if len(rows) == 1 else (2, 4), strict=True):
        ids = whole(tokenizer, CONVERSATION[:length])
        # where the template does not end the last answer
        assert row.ids in (ids, [*ids, tokenizer.end_id])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_answer_that_generation_could_not_give_is_refused(name: str) -> None:
    with pytest.raises(
        DataError,
        match=r"message 1: the chat template's generation prompt ends with .*\breasoning_content",
    ):
        learned_rows(tokenizer_with(TEMPLATES[name]), CONVERSATION, None, None)


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "MiniMax-M2", "GLM-4.7-Flash"])
def test_thinking_that_a_template_drops_later_is_learned(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    thinking = [
        {**one, "reasoning_content": f"hmm {one['content']}"} if one["role"] == "assistant" else one
        for one in CONVERSATION
    ]
    rows = learned_rows(tokenizer, thinking, None, None)
    texts = [learned(tokenizer, row) for row in rows]
    assert [len(one) for one in texts] == [1, 1]
    assert ["hmm first" in texts[0][0], "hmm second" in texts[1][0]] == [True, True]
    assert "hmm first" not in text_of(tokenizer, rows[1].ids)


def test_what_a_template_leaves_out_of_an_answer_is_refused() -> None:
    tokenizer = tokenizer_with(TEMPLATES["Qwen-Qwen2.5-7B-Instruct"])
    messages = [CONVERSATION[0], {**CONVERSATION[1], "reasoning_content": "hmm"}]
    with pytest.raises(
        DataError, match="message 1: the chat template omits 'hmm' from this answer"
    ):
        learned_rows(tokenizer, messages, None, None)
    with pytest.raises(DataError, match="message 1: the chat template does not show this answer"):
        learned_rows(tokenizer, [CONVERSATION[0], {"role": "assistant", "content": ""}], None, None)


CALLS = {
    "Qwen-Qwen2.5-7B-Instruct": (
        '<tool_call>\n{"name": "lookup", "arguments": {"key": "v"}}\n</tool_call><|im_end|>'
    ),
    "openai-gpt-oss-120b": (
        ' to=functions.lookup<|channel|>commentary json<|message|>{"key": "v"}<|call|>'
    ),
    "GLM-4.6": (
        "\n<think></think>\n<tool_call>lookup\n<arg_key>key</arg_key>\n<arg_value>v</arg_value>\n</tool_call><|observation|>"
    ),
}


@pytest.mark.parametrize(("name", "call"), CALLS.items())
@pytest.mark.parametrize("arguments", ['{"key": "v"}', {"key": "v"}])
def test_calls_are_learned_and_results_are_not(name: str, call: str, arguments: Any) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    function = {"name": "lookup", "arguments": arguments}
    messages = [
        {"role": "user", "content": "hello?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "function": function}],
        },
        {"role": "tool", "content": "408", "tool_call_id": "call00000", "name": "lookup"},
        {"role": "assistant", "content": "So 408."},
    ]
    [row] = learned_rows(tokenizer, messages, None, None)
    assert learned(tokenizer, row)[0] == call
    assert "So 408." in learned(tokenizer, row)[1] and len(learned(tokenizer, row)) == 2


# ---- files


def _file(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return [folder / "rows.parquet"]


def test_a_column_says_which_turns_are_learned(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TEMPLATES["Qwen-Qwen2.5-7B-Instruct"])
    rows = [
        {"chat": CONVERSATION, "learn": [True, False]},
        {"chat": CONVERSATION, "learn": [False, True]},
        {"chat": CONVERSATION[:2], "learn": [True]},
    ]
    sft = SftConfig(messages_key="chat", learned_key="learn")
    batch = SftDataset(_file(tmp_path, rows), tokenizer, DataConfig(), sft).batch([0, 1, 2])
    texts = []
    for number in range(3):
        prompt, ids, mask = (
            batch.jagged(name).row(number)
            for name in ("prompt_ids", "response_ids", "response_mask")
        )
        texts.append(text_of(tokenizer, ids[mask].tolist()))
        assert mask[0] and len(prompt)
    assert texts == ["first<|im_end|>", "second<|im_end|>", "first<|im_end|>"]


def test_tools_of_a_row_are_shown(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TEMPLATES["Qwen-Qwen2.5-7B-Instruct"])
    tool = '[{"type": "function", "function": {"name": "lookup", "description": "Looks up."}}]'
    rows = [{"chat": CONVERSATION, "tools": tool}, {"chat": CONVERSATION, "tools": None}]
    sft = SftConfig(messages_key="chat", tools_key="tools")
    batch = SftDataset(
        _file(tmp_path, rows), tokenizer, DataConfig(max_prompt_length=1024), sft
    ).batch([0, 1])
    shown = [
        text_of(tokenizer, batch.jagged("prompt_ids").row(number).tolist()) for number in (0, 1)
    ]
    assert ["Looks up." in text for text in shown] == [True, False]


def test_long_conversations_are_refused_dropped_or_cut(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TEMPLATES["moonshotai-Kimi-K2"])
    files = _file(tmp_path, [{"chat": CONVERSATION}, {"chat": CONVERSATION[:2]}])
    lengths = [len(whole(tokenizer, CONVERSATION)), len(whole(tokenizer, CONVERSATION[:2]))]
    limits = {"max_prompt_length": lengths[1], "max_response_length": 1}
    sft = SftConfig(messages_key="chat")
    with pytest.raises(
        DataError,
        match=rf"row 0: the conversation has {lengths[0]} tokens, but data\.max_prompt_length \+",
    ):
        SftDataset(files, tokenizer, DataConfig(**limits), sft)
    dropped = SftDataset(files, tokenizer, DataConfig(**limits, filter_overlong_prompts=True), sft)
    assert (len(dropped), dropped.num_filtered) == (1, 1)
    cut = SftDataset(files, tokenizer, DataConfig(**limits, truncation="right"), sft)
    assert (len(cut), cut.num_truncated) == (2, 1)
    row = cut.batch([0])
    ids = [*row.jagged("prompt_ids").row(0), *row.jagged("response_ids").row(0)]
    assert ids == whole(tokenizer, CONVERSATION)[: lengths[1] + 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chat": "hello", "learn": [True]}, "invalid JSON"),
        ({"chat": [], "learn": [True]}, "expected a list of chat messages"),
        (
            {"chat": [{"role": "user", "content": None}], "learn": []},
            "expected a list of chat messages",
        ),
        ({"chat": CONVERSATION[:1], "learn": []}, "no assistant message to train on"),
        ({"chat": CONVERSATION, "learn": [False, False]}, "no assistant message to train on"),
        (
            {"chat": CONVERSATION, "learn": [True]},
            "one boolean for each of the 2 assistant messages, got 1",
        ),
        ({"chat": CONVERSATION, "learn": None}, "expected a list of booleans"),
    ],
)
def test_malformed_conversations_are_named_with_their_row(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    files = _file(tmp_path, [row])
    with pytest.raises(DataError, match=rf"rows\.parquet, row 0, column 'chat': .*{message}"):
        SftDataset(
            files,
            tokenizer_with(TEMPLATES["moonshotai-Kimi-K2"]),
            DataConfig(),
            SftConfig(messages_key="chat", learned_key="learn"),
        )
