"""The tokenizer of Kimi and Moonlight, read from `tiktoken.model` and tokenizer_config.json without
running the models' remote code.

`tiktoken.model` has one line per token: its bytes in base64 and its rank, which is also its id. A
text is split with a fixed regular expression, and the bytes of each piece are merged pairwise, in
ascending order of the merged token's rank. The `tokenizers` library produces the same result from a
list of all merges in that order.
"""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config.outside_json import read_outside_json
from hybridflow.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

RANKS = "tiktoken.model"
_CLASS = "TikTokenTokenizer"
_RESERVED = 256  # ids after the ordinary tokens; unnamed ones are <|reserved_token_ID|>
# the published file has 163,584 lines, 2.8 MB, and tokens of up to 128 bytes
_MOST_BYTES = 8 << 20
_LONGEST_TOKEN = 512
# longer texts and runs are split first
_MOST_CHARACTERS = 400_000
_LONGEST_RUN = 25_000
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def is_tiktoken_folder(folder: Path) -> bool:
    """Return True if the folder's tokenizer is a `tiktoken.model` without a tokenizer.json."""
    return (folder / RANKS).is_file() and not (folder / "tokenizer.json").exists()


def read_tiktoken(folder: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer of the folder.

    Raises:
        DataError: a file is missing or invalid, or the tokenizer is neither Kimi's nor Moonlight's,
            so its split pattern is defined only in code.
    """
    file = folder / "tokenizer_config.json"
    try:
        config = read_outside_json(file)
    except (OSError, ValueError) as error:
        raise DataError(
            f"could not read {file} ({error}); it lists the special tokens of {RANKS}"
        ) from error
    if config.get("tokenizer_class") != _CLASS:
        raise DataError(
            f"{file}: tokenizer_class {config.get('tokenizer_class')!r} is not supported; of the "
            f"tokenizers with a {RANKS}, only {_CLASS} (Kimi, Moonlight) can be read without "
            "running remote code. Add a tokenizer.json to the folder"
        )
    ranks = _ranks_of(folder / RANKS)
    tokenizer = _tokenizer(ranks)
    tokenizer.add_tokens(_special_tokens(file, config, len(ranks)))
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if token := _name(config, key):
            names[key] = token
    found = _fast_class()(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    template = folder / "chat_template.jinja"
    found.chat_template = (
        template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template")
    )
    return found


def parts_of(text: str) -> Iterator[str]:
    """Yield the parts of the text that are encoded separately: each has at most 400,000 characters
    and no run of more than 25,000 whitespace or 25,000 non-whitespace characters."""
    for start in range(0, len(text), _MOST_CHARACTERS):
        part = text[start : start + _MOST_CHARACTERS]
        begin = 0
        for run in re.finditer(r"\s+|\S+", part) if len(part) > _LONGEST_RUN else ():
            for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def _fast_class() -> type[PreTrainedTokenizerFast]:
    from transformers import PreTrainedTokenizerFast

    class TiktokenTokenizer(PreTrainedTokenizerFast):
        """A tokenizer that splits long texts into the same parts as the models' own code."""

        parts_of = staticmethod(parts_of)

        def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
            """Return the token ids of the text, without adding special tokens around it."""
            tokens: list[int] = []
            for part in parts_of(text):
                tokens.extend(super().encode(part, *args, **options))
            return tokens

    return TiktokenTokenizer


def _ranks_of(file: Path) -> dict[bytes, int]:
    """Read the ranks of all tokens. They must be 0, 1, 2, ... in any order, and every byte must be
    a token."""
    data = file.open("rb").read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise DataError(f"{file} is larger than the limit of {_MOST_BYTES} bytes")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = a2b_base64(text, strict_mode=True)
            ranks[token] = int(rank)
        except (Base64Error, ValueError) as error:
            raise DataError(
                f"{file}, line {number}: expected a base64 token and its rank ({error})"
            ) from error
        if not 0 < len(token) <= _LONGEST_TOKEN:
            raise DataError(
                f"{file}, line {number}: expected a token of 1 to {_LONGEST_TOKEN} bytes, got "
                f"{len(token)}"
            )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(
            f"{file}: expected each rank from 0 to {len(ranks) - 1} exactly once; is the file "
            "complete?"
        )
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(
            f"{file} has no token for {len(missing)} bytes, for example {missing[0]}; is the file "
            "complete?"
        )
    return ranks


def _tokenizer(ranks: dict[bytes, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    names = {}
    for token in ranks:
        names[token] = "".join(letters[byte] for byte in token)
    merges = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            if token[:at] in ranks and token[at:] in ranks:
                merges.append(
                    (
                        rank,
                        ranks[token[:at]],
                        ranks[token[at:]],
                        names[token[:at]],
                        names[token[at:]],
                    )
                )
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _special_tokens(file: Path, config: dict[str, Any], first: int) -> list[Any]:
    """Return the special tokens ordered by id, named as in `added_tokens_decoder`. The other
    reserved ids get placeholder names."""
    from tokenizers import AddedToken

    named: dict[int, str] = {}
    try:
        for number, token in config["added_tokens_decoder"].items():
            named[int(number)] = str(token["content"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{file}: added_tokens_decoder must have the form {{id: {{content: token}}}} "
            f"({error!r})"
        ) from error
    last = max([first + _RESERVED - 1, *named])
    if min(named, default=first) < first or last >= first + 4 * _RESERVED:
        raise DataError(
            f"{file}: added_tokens_decoder has ids {min(named)} to {max(named)}, but the last id "
            f"in {RANKS} is {first - 1}; do both files belong to the same model?"
        )
    names = [named.get(number, f"<|reserved_token_{number}|>") for number in range(first, last + 1)]
    if len(set(names)) != len(names):
        raise DataError(f"{file}: added_tokens_decoder lists a token under several ids")
    return [AddedToken(name, special=True, normalized=False) for name in names]


def _name(config: dict[str, Any], key: str) -> str | None:
    """Return the text of a special token, given as a string or as an object with the key
    `content`."""
    token = config.get(key)
    return token.get("content") if isinstance(token, dict) else token
