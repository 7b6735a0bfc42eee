"""Generation of tiny tokenizers in Hugging Face format: character-level for arithmetic, byte-level
for text. Does not download anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD = "<pad>"
EOS = "<eos>"
UNK = "<unk>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
END = "<|end|>"

# Writes message contents unchanged, "=" as the generation prompt, and eos after an answer:
# "12+34=".
CHARACTER_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}={{ message['content'] "
    "}}<eos>{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}={% endif %}"
)
ROLE_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] "
    "}}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# The same, with the tokens of an image in the place of each part {"type": "image"}.
IMAGE_WORDS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}={% endif %}{% if "
    "message['content'] is string %}{{ message['content'] }}{% else %}{% for part in "
    "message['content'] %}{% if part['type'] == 'image' %}" + "".join(IMAGE_WORDS) + "{% else %}{{ "
    "part['text'] }}{% endif %}{% endfor %}{% endif %}{% if message['role'] == 'assistant' "
    "%}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def write_character_tokenizer(
    folder: Path, characters: str, words: Sequence[str] = (), template: str = CHARACTER_TEMPLATE
) -> None:
    """Write a tokenizer with one token per character; ids 0, 1, 2 are pad, eos, unknown, then
    `characters` and `words` in order. No BOS.

    Args:
        folder: created if needed; tokenizer.json, tokenizer_config.json and chat_template.jinja are
            written to it.
        characters: the alphabet, without duplicates; any other character becomes the unknown token.
        words: strings that are always encoded as one token; if several match at the same position,
            the first in the list wins.
        template: the chat template.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {}
    for index, token in enumerate([PAD, EOS, UNK, *characters, *words]):
        vocabulary[token] = index
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    pattern = "|".join([*map(re.escape, words), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    _save(tokenizer, folder, template, eos=EOS, unk=UNK)


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per UTF-8 byte: ids 0-4 are pad, end of turn (eos) and the
    roles, followed by the 256 bytes. No BOS."""
    _save(byte_level([PAD, END, *ROLES]), folder, ROLE_TEMPLATE, eos=END, unk=None)


def byte_level(specials: Sequence[str]) -> Tokenizer:
    """Build a tokenizer that consists of the special tokens, starting at id 0, followed by one
    token per UTF-8 byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    return tokenizer


def _save(
    tokenizer: Tokenizer, folder: Path, chat_template: str, *, eos: str, unk: str | None
) -> None:
    from transformers import PreTrainedTokenizerFast

    unknown = {} if unk is None else {"unk_token": unk}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        **unknown,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(str(folder))
