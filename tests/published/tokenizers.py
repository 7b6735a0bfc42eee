"""Tokenizer files of each family: its split patterns, special tokens and chat template, over a
small vocabulary that is trained on the spot."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.published.texts import mixed_texts

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
_CASED = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_CASED[0]}]*[{_CASED[1]}]+{_CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_CASED[0]}]+[{_CASED[1]}]*{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        _REST,
    )
)

LLAMA_TEMPLATE = (
    "{{- bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>' + '\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- "
    "'<|im_start|>assistant\n' }}{%- endif %}"
)
MIXTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ ' [INST] ' + "
    "message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + "
    "message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles "
    "are supported!') }}{% endif %}{% endfor %}"
)
GLM_TEMPLATE = (
    "[gMASK]<sop>{%- for m in messages %}{%- if m.role == 'user' %}<|user|>\n{{ m.content }}{%- "
    "elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{%- elif m.role == 'system' "
    "%}<|system|>\n"
    "{{ m.content }}{%- elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{%- endif %}{%- "
    "endfor %}{%- if add_generation_prompt %}<|assistant|>\n{%- endif %}"
)
DEEPSEEK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' "
    "+ message['content'] }}{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + "
    "message['content'] + '<｜end▁of▁sentence｜>' }}{% else %}{{ message['content'] }}{% endif "
    "%}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
KIMI_TEMPLATE = (
    "{%- for message in messages -%}{%- if loop.first and messages[0]['role'] != 'system' "
    "-%}<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>{%- endif -%}<|im_{{ "
    "'user' if message['role'] == 'user' else 'assistant' if message['role'] == 'assistant' else "
    "'system' }}|>{{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>{%- endfor "
    "-%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)
TEKKEN_TEMPLATE = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST]' + m.content + "
    "'[/INST]' }}{%- elif m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + "
    "'[/SYSTEM_PROMPT]' }}{%- else %}{{- m.content + eos_token }}{%- endif %}{%- endfor %}"
)
_KIMI_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}
KIMI_RESERVED = 256


@dataclass(frozen=True)
class Form:
    """The tokenizer of a family as it is published.

    Attributes:
        specials: special tokens in the order of their ids, behind the ordinary ones.
        stops: special tokens that generation_config.json and, for Llama and GLM, config.json name.
        rows: of the embedding, which is larger than the vocabulary.
    """

    tokenizer_class: str
    template: str
    splits: tuple[str, ...] = ()
    specials: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = ""
    pad: str | None = None
    stops: tuple[str, ...] = ()
    template_file: bool = False
    rows: int = 640


FORMS = {
    "llama-3.1": Form(
        "PreTrainedTokenizerFast",
        LLAMA_TEMPLATE,
        (LLAMA_SPLIT,),
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|reserved_special_token_0|>",
            "<|finetune_right_pad_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "qwen2.5": Form(
        "Qwen2Tokenizer",
        CHATML_TEMPLATE,
        (QWEN_SPLIT,),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    ),
    "mixtral": Form(
        "LlamaTokenizer",
        MIXTRAL_TEMPLATE,
        specials=("<unk>", "<s>", "</s>"),
        bos="<s>",
        eos="</s>",
        stops=("</s>",),
    ),
    "glm-4.5": Form(
        "PreTrainedTokenizer",
        GLM_TEMPLATE,
        (LLAMA_SPLIT,),
        (
            "<|endoftext|>",
            "[MASK]",
            "[gMASK]",
            "[sMASK]",
            "<sop>",
            "<eop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<think>",
            "</think>",
        ),
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        template_file=True,
    ),
    "deepseek-v3": Form(
        "LlamaTokenizerFast",
        DEEPSEEK_TEMPLATE,
        DEEPSEEK_SPLITS,
        (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜▁pad▁｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
        ),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        pad="<｜end▁of▁sentence｜>",
        stops=("<｜end▁of▁sentence｜>",),
    ),
    "moonlight": Form(
        "TikTokenTokenizer",
        KIMI_TEMPLATE,
        (KIMI_SPLIT,),
        bos="[BOS]",
        eos="<|im_end|>",
        pad="[PAD]",
        stops=("<|im_end|>",),
        rows=768,
    ),
}
FORMS["qwen3"] = FORMS["qwen3-moe"] = FORMS["qwen2.5"]
FORMS["kimi-k2"] = Form(
    "TikTokenTokenizer",
    KIMI_TEMPLATE,
    (KIMI_SPLIT,),
    bos="[BOS]",
    eos="[EOS]",
    pad="[PAD]",
    stops=("<|im_end|>",),
    template_file=True,
    rows=768,
)


def write_tokenizer(family: str, folder: Path) -> dict[str, int]:
    """Write the family's tokenizer files; {token: id} of its special tokens."""
    form = FORMS[family]
    folder.mkdir(parents=True, exist_ok=True)
    write = {"LlamaTokenizer": _sentencepiece, "TikTokenTokenizer": _tiktoken}.get(
        form.tokenizer_class, _byte_level
    )
    specials = write(form, folder)
    if family.startswith("qwen"):
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
        (folder / "merges.txt").write_text(
            "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])
        )
    if family in ("llama-3.1", "mixtral"):
        named = {"bos_token": form.bos, "eos_token": form.eos}
        (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2))
    _config(
        form,
        folder,
        specials,
        "tokenization_kimi" if family == "kimi-k2" else "tokenization_moonshot",
    )
    return specials


def _config(form: Form, folder: Path, specials: dict[str, int], code: str) -> None:
    kept = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config: dict[str, Any] = {
        "added_tokens_decoder": {
            str(number): {"content": token, **kept, "special": _special(token)}
            for token, number in specials.items()
        },
        "additional_special_tokens": [
            token for token in form.specials if token not in (form.bos, form.eos)
        ],
        "bos_token": form.bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": form.eos,
        "model_max_length": 131072,
        "pad_token": form.pad,
        "tokenizer_class": form.tokenizer_class,
    }
    if form.tokenizer_class == "TikTokenTokenizer":
        config |= {
            "auto_map": {"AutoTokenizer": [f"{code}.TikTokenTokenizer", None]},
            "unk_token": "[UNK]",
        }
        config["additional_special_tokens"] = [
            "<|im_end|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "[EOT]",
            "<|im_system|>",
        ]
    if form.template_file:
        (folder / "chat_template.jinja").write_text(form.template)
    else:
        config["chat_template"] = form.template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))


def _split(patterns: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _trained(patterns: Sequence[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _split(patterns)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(mixed_texts(400, seed=1), trainer)
    return tokenizer


def _byte_level(form: Form, folder: Path) -> dict[str, int]:
    tokenizer = _trained(form.splits, 480)
    if form.tokenizer_class == "Qwen2Tokenizer":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    # published ones are not special where templates write them around thoughts and calls
    tokenizer.add_tokens(
        [AddedToken(t, special=_special(t), normalized=False) for t in form.specials]
    )
    specials = {token: int(tokenizer.token_to_id(token)) for token in form.specials}
    if form.bos is not None:
        first = f"{form.bos} $A"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=first,
            pair=f"{first} {form.bos} $B",
            special_tokens=[(form.bos, specials[form.bos])],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    return specials


def _special(token: str) -> bool:
    return "tool_call" not in token and "think>" not in token


def _sentencepiece(form: Form, folder: Path) -> dict[str, int]:
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.replace("\x00", "") for text in mixed_texts(400, seed=1)),
        model_writer=written,
        model_type="bpe",
        vocab_size=620,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    read = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    vocabulary = {read.IdToPiece(number): number for number in range(len(read))}
    merges = _pairs(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in form.specials]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return {token: vocabulary[token] for token in form.specials}


def _pairs(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third, by the id of that one."""
    found = []
    for token, number in vocabulary.items():
        for at in range(1, len(token)):
            if token[:at] in vocabulary and token[at:] in vocabulary:
                found.append(
                    (number, vocabulary[token[:at]], vocabulary[token[at:]], token[:at], token[at:])
                )
    return [(left, right) for *_, left, right in sorted(found)]


def write_tekken(folder: Path) -> None:
    """A `tekken.json` as Mistral publishes it (its fields, its pattern), and a chat template.

    40 ids are for special tokens, of which `TEKKEN_SPECIALS` are named. The last 30 ordinary tokens
    exceed the size of the vocabulary, and have no ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = _ranked((TEKKEN_SPLIT,))
    config = {
        "pattern": TEKKEN_SPLIT,
        "num_vocab_tokens": len(lines),
        "default_vocab_size": 40 + len(lines) - 30,
        "default_num_special_tokens": 40,
        "version": "v11",
    }
    vocab = [{"rank": n, "token_bytes": line, "token_str": None} for n, line in enumerate(lines)]
    specials = [
        {"rank": rank, "token_str": token, "is_control": True}
        for rank, token in enumerate(TEKKEN_SPECIALS)
    ]
    whole = {"config": config, "vocab": vocab, "special_tokens": specials}
    (folder / "tekken.json").write_text(json.dumps(whole))
    (folder / "chat_template.jinja").write_text(TEKKEN_TEMPLATE)


def _ranked(splits: Sequence[str]) -> list[str]:
    """Tokens in base64 in the order of their ranks, the bytes first."""
    trained = _trained(splits, 480)
    letters = {letter: number for number, letter in enumerate(_byte_letters())}
    tokens = sorted(trained.get_vocab().items(), key=lambda item: (len(item[0]) > 1, item[1]))
    return [
        base64.b64encode(bytes(letters[letter] for letter in token)).decode() for token, _ in tokens
    ]


def _tiktoken(form: Form, folder: Path) -> dict[str, int]:
    """`tiktoken.model`: base64 and rank of each token."""
    lines = _ranked(form.splits)
    (folder / "tiktoken.model").write_text(
        "".join(f"{line} {rank}\n" for rank, line in enumerate(lines))
    )
    return {token: len(lines) + offset for offset, token in _KIMI_SPECIALS.items()}


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
