"""Search for a tokenizer's added tokens (special tokens and other vocabulary additions) in text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Found:
    """An added token found in a text. The span `begin` to `end` includes the whitespace that the
    token strips."""

    token: str
    begin: int
    end: int


class AddedTokens:
    """Finds added tokens in text with the tokenizer's rules: the leftmost match wins, then the
    longest.

    Args:
        decoder: the tokenizer's `added_tokens_decoder`, {id: token}.
    """

    def __init__(self, decoder: Mapping[int, Any]) -> None:
        self.ids: dict[str, int] = {
            token.content: number for number, token in decoder.items() if token.content
        }
        self.numbers = frozenset(self.ids.values())
        self._tokens = {token.content: token for token in decoder.values()}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find(self, text: str, begin: int = 0) -> Iterator[Found]:
        """Yield the added tokens in the text in order, starting at offset `begin`."""
        position = begin
        while match := self._pattern.search(text, position):
            token = self._tokens[match[0]]
            start, end = match.span()
            if token.lstrip:
                start = position + len(text[position:start].rstrip())
            if token.rstrip:
                end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
            yield Found(match[0], start, end)
            position = end
