"""Text from outside as tokens: added tokens that are written out in it stay text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from hybridflow.data.added_tokens import AddedTokens
from hybridflow.data.chat_template import Piece, common_beginning

_NOT_SPACE = re.compile(r"\S")
# of a token, most of the time; tokens at the end of a part of a text
_CHARACTERS = 8
_UNSURE = 64
_NEUTRAL = "\ufffc"  # in place of what must not be read as a token
_HALF = re.compile("[\ud800-\udfff]")
# an added token before each part, which is then not taken for the beginning of a text; nothing from
# outside knows it
_ANCHOR = f"<anchor {secrets.token_hex(16)}>"


def whole_text(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which no tokenizer and no file can
    hold."""
    if not _HALF.search(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _HALF.sub("\ufffd", joined)


class PlainText:
    """Encodes pieces of a prompt as the tokenizer encodes the whole, but for added tokens in
    literal pieces.

    Args:
        hf_tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self.added = AddedTokens(hf_tokenizer.added_tokens_decoder)

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Token ids of the pieces, one after another; merges go over their borders as in one
        text."""
        pieces = [Piece(whole_text(piece.text), piece.is_literal) for piece in pieces]
        text = "".join(piece.text for piece in pieces)
        # white space stays, as added tokens may take what is around them
        seen = "".join(
            _NOT_SPACE.sub(_NEUTRAL, piece.text) if piece.is_literal else piece.text
            for piece in pieces
        )
        ids: list[int] = []
        place = 0
        for found in self.added.find(seen):
            ids += [*self.encode(text[place : found.begin]), self.added.ids[found.token]]
            place = found.end
        return ids + self.encode(text[place:])

    def encode(self, text: str) -> list[int]:
        """Token ids of text that stands between others; nothing in it is an added token."""
        ids = self._ids(text)
        if self.added.numbers.isdisjoint(ids):
            return ids
        # a vocabulary may hold added tokens as ordinary ones too: cut in the middle they are none
        parts = list(self._cut_tokens(text))
        return ids if len(parts) == 1 else [token for part in parts for token in self._ids(part)]

    def cut(self, text: str, most: int | None) -> str:
        """The text up to its first `most` tokens. Of a long text no more is encoded than these
        need."""
        if most is None or len(text.encode()) <= most:
            return text
        size = _CHARACTERS * most
        while True:
            part = text[:size]
            is_whole = len(part) == len(text)
            # the last tokens of a part may be others in the whole text
            if (found := self._cut(part, most, 0 if is_whole else _UNSURE)) is not None:
                return found
            if is_whole:
                return text
            size *= 4

    def _cut(self, text: str, most: int, unsure: int) -> str | None:
        """The text up to its first `most` tokens; None where it does not have `unsure` more than
        these."""
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
        """The tokenizer without added tokens; None for one that is not of the library
        `tokenizers`."""
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
