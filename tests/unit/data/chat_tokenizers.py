"""Tokenizers around chat templates: byte pairs with merges, and the tokens that a template names as
added ones."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from hybridflow.data.tokenizer import Tokenizer

# by the name of the model in whose form each is written
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
# what models stop at, in one template or another
ENDS = (
    *(
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "</s>",
        "<｜end▁of▁sentence｜>",
        "<|user|>",
        "<|observation|>",
    ),
    *(
        "<|return|>",
        "<|call|>",
        "[e~[",
        "<|end|>",
        "<|end_of_text|>",
        "<seed:eos>",
        "<|assistant_end|>",
        "<|tools_suffix|>",
    ),
)
_TOKEN = re.compile(r"<\|[^|<>\s']+\|>|<｜[^｜<>\s']+｜>|</?[a-z_:]+>|\[/?[A-Z_]+\]|\]~b\]|\[e~\[")
_CORPUS = [
    'hello\n\nworld 408\n "hi" \\n <tool_response>\n</tool_response>\n{"a": 12, "b": 34}\n',
    "## Return of  \n\n\n",
]


@functools.cache
def _merges() -> str:
    """Byte pairs that merge over line breaks, so that texts beside each other are other tokens than
    apart."""
    found = Backend(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        _CORPUS * 9, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet)
    )
    return str(found.to_str())


def tokenizer_with(template: str, eos: str | None = None) -> Tokenizer:
    """A tokenizer with this template. Tags in small letters are added tokens that are not special,
    as in Qwen3."""
    tokens = sorted({*_TOKEN.findall(template), "<|endoftext|>", "</s>", *([eos] if eos else [])})
    backend = Backend.from_str(_merges())
    for token in tokens:
        is_tag = re.fullmatch(r"</?[a-z_]+>", token) is not None and token != "</s>"
        add = backend.add_tokens if is_tag else backend.add_special_tokens
        add([AddedToken(token, special=not is_tag, normalized=False)])
    ends = [end for end in (*([eos] if eos else []), *ENDS) if end in tokens]
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=ends[0],
        bos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = template
    return Tokenizer(
        hf, Path("templated"), tuple(sorted(hf.convert_tokens_to_ids(end) for end in ends))
    )
