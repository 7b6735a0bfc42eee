"""Tokenizers with the chat templates of four families, an engine that answers what it is told to,
and conversations with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.agents.conversation import Conversation, Sampled
from hybridflow.config.schema import AgentConfig
from hybridflow.data.prepare.tokenizer_files import byte_level
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer

# (special tokens, the one that ends an answer, template): written here in the manner of four
# families of models
FAMILIES = {
    "chatml": (
        ["<|im_start|>", "<|im_end|>", "<think>"],
        "<|im_end|>",
        (
            "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ "
            "m.content }}\n"
            "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
            "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ "
            "m.content }}<|im_end|>\n"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif "
            "%}"
        ),
    ),
    "headers": (
        ["<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"],
        "<|eot|>",
        (
            "<|begin|>{% for m in messages %}<|header|>{{ 'ipython' if m.role == 'tool' else "
            "m.role }}<|/header|>\n\n"
            "{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt "
            "%}<|header|>assistant<|/header|>\n\n{% endif %}"
        ),
    ),
    "marks": (
        ["<｜begin｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end｜>", "<｜output｜>"],
        "<｜end｜>",
        (
            "<｜begin｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content "
            "}}<｜Assistant｜>{% elif m.role == 'assistant' %}{{ m.content }}<｜end｜>{% else "
            "%}<｜output｜>{{ m.content }}<｜Assistant｜>{% endif %}{% endfor %}"
        ),
    ),
    "roles": (
        ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "<|observation|>",  # an answer ends where the next role begins
        (
            "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role "
            "}}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% "
            "endif %}"
        ),
    ),
}


def byte_tokenizer(folder: Path, specials: Sequence[str], end: str, template: str) -> Tokenizer:
    """A token a byte, and the special ones."""
    from transformers import PreTrainedTokenizerFast

    fast = byte_level(specials)
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token=end, clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    made.save_pretrained(str(folder))
    return load_tokenizer(folder)


class Engine:
    """Answers with the texts that it was given, and keeps what it was asked."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.asked = list[tuple[list[int], int]]()

    async def sample(self, tokens: Sequence[int], most: int) -> Sampled:
        self.asked.append((list(tokens), most))
        text = self.tokenizer.encode(self.texts.pop(0))
        ids = np.array([*text, self.tokenizer.eos_id][:most])
        reason = "stop" if len(text) < most else "length"
        return Sampled(
            ids, -np.arange(1.0, len(ids) + 1, dtype=np.float32), np.full(len(ids), 7), reason
        )


def conversation(
    tokenizer: Tokenizer, engine: Engine, room: int = 1000, **settings: Any
) -> Conversation:
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is 12 * 34?"}])
    return Conversation(
        prompt, {}, AgentConfig(loop="tools", **settings), tokenizer, engine.sample, room
    )
