"""`hybridflow sft` on whole conversations: its loss is that of transformers on what the assistant
said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.forked import ForkedRun
from tests.published.folders import published_folder

pytestmark = pytest.mark.slow
RECIPE = """
defaults: [data: files, model: folder, actor: tiny, rollout: tiny, algorithm: grpo, cluster: in-process,
           trainer: smoke, reward: builtin, sft: smoke, _self_]
name: chats
model: {{path: {folder}/hf, dtype: float32}}
data: {{train_files: [], max_prompt_length: 96, max_response_length: 96}}
sft:
  train_files: [{folder}/chats.jsonl]
  messages_key: messages
  learned_key: learn
  batch_size: 4
  steps: 4
output_dir: {folder}/runs
"""
# what the assistant says, and what ends it, in the text of the template
_SAID = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


def chats() -> list[dict[str, Any]]:
    """Conversations of one to three turns; of the last one the first turn is not learned."""
    found = []
    for number in range(4):
        said = [
            {"role": role, "content": f"{text} {turn + number}"}
            for turn in range(1 + number % 3)
            for role, text in (("user", "the model and"), ("assistant", "token answer of"))
        ]
        found.append({"messages": said, "learn": [True] * (len(said) // 2)})
    found[2]["learn"][0] = False
    return found


@torch.no_grad()
def oracle(folder: Path) -> float:
    """The mean loss of learned tokens, by transformers' model, tokenizer and template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses = []
    for chat in chats():
        text = tokenizer.apply_chat_template(chat["messages"], tokenize=False)
        spans = [
            span.span(1)
            for span, learn in zip(_SAID.finditer(text), chat["learn"], strict=True)
            if learn
        ]
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt"
        )
        ids = encoded["input_ids"]
        places = encoded["offset_mapping"][0, 1:, 0].tolist()
        chosen = torch.tensor(
            [any(begin <= place < end for begin, end in spans) for place in places]
        )
        loss = torch.nn.functional.cross_entropy(
            model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none"
        )
        losses.append(loss[chosen])
    return float(torch.cat(losses).mean())


def test_the_loss_is_that_of_the_assistants_turns(tmp_path: Path) -> None:
    source = published_folder("qwen3", tmp_path / "hf")
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats())))
    (tmp_path / "chats.yaml").write_text(RECIPE.format(folder=tmp_path))
    recipe = ("--config-dir", str(tmp_path), "--config-name", "chats")
    with ForkedRun(tmp_path / "output", "sft", *recipe) as run:
        assert run.end(120) == 0, run.out + run.err
    losses = [
        one["sft/loss"]
        for one in read_jsonl(tmp_path / "runs" / "chats" / "metrics.jsonl")
        if "sft/loss" in one
    ]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert losses[0] == pytest.approx(oracle(source), rel=1e-4)
