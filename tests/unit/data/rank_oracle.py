"""tiktoken's algorithm, written out: special tokens first, then pieces of the pattern, then merges by
lowest rank."""

from __future__ import annotations

import re

import regex


class RankOracle:
    """A tokenizer of ranks {bytes: rank}, whose ids start at `first`, and special tokens
    {text: id}."""

    def __init__(
        self, ranks: dict[bytes, int], specials: dict[str, int], pattern: str, first: int = 0
    ) -> None:
        self.ranks = ranks
        self.specials = specials
        self.first = first
        longest = sorted(specials, key=len, reverse=True)
        self.split = re.compile("(" + "|".join(map(re.escape, longest)) + ")")
        self.pattern = regex.compile(pattern, regex.V1)
        self.merged: dict[bytes, list[int]] = {}

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        ids: list[int] = []
        for part in self.split.split(text) if specials else [text]:
            if specials and part in self.specials:
                ids.append(self.specials[part])
                continue
            for piece in self.pattern.findall(part):
                ids += [self.first + rank for rank in self.pairs(piece.encode())]
        return ids

    def pairs(self, piece: bytes) -> list[int]:
        if piece not in self.merged:
            self.merged[piece] = self.merge(piece)
        return self.merged[piece]

    def merge(self, piece: bytes) -> list[int]:
        if piece in self.ranks:
            return [self.ranks[piece]]
        parts = [bytes([byte]) for byte in piece]
        while True:
            found = [
                (rank, at)
                for at in range(len(parts) - 1)
                if (rank := self.ranks.get(parts[at] + parts[at + 1])) is not None
            ]
            if not found:
                return [self.ranks[part] for part in parts]
            rank = min(found)[0]
            at = 0
            # the leftmost first; a merge makes no pair of the same rank to its left
            while at < len(parts) - 1:
                if self.ranks.get(parts[at] + parts[at + 1]) == rank:
                    parts[at : at + 2] = [parts[at] + parts[at + 1]]
                at += 1
