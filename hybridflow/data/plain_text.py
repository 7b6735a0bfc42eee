"""Tokenization of untrusted text. Special tokens spelled out in it are encoded as plain text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from hybridflow.data.added_tokens import AddedTokens
from hybridflow.data.chat_template import Piece, common_beginning

_NOT_SPACE = re.compile(r"\S")
# typical characters per token; number of tokens at the end of a prefix that may differ in the full
# text
_CHARACTERS = 8
_UNSURE = 64
_NEUTRAL = "\ufffc"  # replaces literal text in the search for added tokens
_HALF = re.compile("[\ud800-\udfff]")
# prepended to each part, so that it is not encoded as the beginning of a text; random, so that
# untrusted text cannot contain it
_ANCHOR = f"<anchor {secrets.token_hex(16)}>"


def whole_text(text: str) -> str:
    """Replace each unpaired surrogate with U+FFFD, because neither tokenizers nor files can encode
    one."""
    if not _HALF.search(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _HALF.sub("\ufffd", joined)


class PlainText:
    """Encodes the pieces of a prompt as one text, but never turns literal pieces into added tokens.

    Args:
        hf_tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self.added = AddedTokens(hf_tokenizer.added_tokens_decoder)

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the token ids of the concatenated pieces. Merges cross piece boundaries."""
        pieces = [Piece(whole_text(piece.text), piece.is_literal) for piece in pieces]
        text = "".join(piece.text for piece in pieces)
        # keep white space, as added tokens may strip it
        seen = ""
        for piece in pieces:
            seen += _NOT_SPACE.sub(_NEUTRAL, piece.text) if piece.is_literal else piece.text
        ids: list[int] = []
        place = 0
        for found in self.added.find(seen):
            ids += [*self.encode(text[place : found.begin]), self.added.ids[found.token]]
            place = found.end
        return ids + self.encode(text[place:])

    def encode(self, text: str) -> list[int]:
        """Encode text from the middle of a prompt without producing added tokens."""
        ids = self._ids(text)
        if self.added.numbers.isdisjoint(ids):
            return ids
        # the vocabulary may also contain added tokens as ordinary ones; splitting their text avoids
        # them
        parts = list(self._cut_tokens(text))
        return ids if len(parts) == 1 else list(chain.from_iterable(map(self._ids, parts)))

    def cut(self, text: str, most: int | None) -> str:
        """Truncate the text to its first `most` tokens. Long texts are not encoded in full."""
        if most is None or len(text.encode()) <= most:
            return text
        size = _CHARACTERS * most
        while True:
            part = text[:size]
            is_whole = len(part) == len(text)
            # the last tokens of a prefix may differ in the full text
            if (found := self._cut(part, most, 0 if is_whole else _UNSURE)) is not None:
                return found
            if is_whole:
                return text
            size *= 4

    def _cut(self, text: str, most: int, unsure: int) -> str | None:
        """Truncate the text to its first `most` tokens. Returns None if the text has at most `most
        + unsure` tokens."""
        if self._backend is None:
            ids = self._ids(text)
            return (
                common_beginning(text, str(self._hf.decode(ids[:most])))
                if len(ids) > most + unsure
                else None
            )
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        return text[: offsets[most][0]] if len(offsets) > most + unsure else None

    def _cut_tokens(self, text: str) -> Iterator[str]:
        place = 0
        for found in self.added.find(text):
            middle = text.index(found.token, found.begin) + len(found.token) // 2
            if middle > place:
                yield text[place:middle]
                place = middle
        yield text[place:]

    def _ids(self, text: str) -> list[int]:
        if not text:
            return []
        if self._backend is None:
            return list(self._hf.encode(text, add_special_tokens=False, split_special_tokens=True))
        return list(self._backend.encode(_ANCHOR + text, add_special_tokens=False).ids[1:])

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer without its added tokens; None if it is not backed by the `tokenizers`
        library."""
        whole = getattr(self._hf, "backend_tokenizer", None)
        if whole is None:
            return None
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        state = json.loads(whole.to_str())
        found = Backend.from_str(
            json.dumps({**state, "added_tokens": [], "truncation": None, "padding": None})
        )
        found.add_special_tokens([AddedToken(_ANCHOR, normalized=False, special=True)])
        return found
