"""The text of samples, stored for searching."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class Texts:
    """The text of a dump's rows in lower case, as one UTF-8 buffer that can be scanned at memory
    bandwidth. Samples of a group share one copy of their prompt."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._prompts: dict[bytes, int] = {}  # -> its number
        self._prompt_of: list[int] = []  # number of each row's prompt
        self._parts: list[bytes] = []
        self._rows = _Scanned([])
        self._of_prompts = _Scanned([])

    def add(self, prompt: str, others: Iterable[str]) -> None:
        """Add a row."""
        text = _searched(prompt)
        if text not in self._prompts:
            self._prompts[text] = len(self._prompts)
            self.nbytes += len(text)
        self._prompt_of.append(self._prompts[text])
        rest = _searched("\n".join(filter(None, others)))
        self.nbytes += len(rest)
        self._parts.append(rest)

    def seal(self) -> None:
        """Prepare for searching. Call this after the last row has been added."""
        self._rows = _Scanned(self._parts)
        self._of_prompts = _Scanned(list(self._prompts))
        self._numbers = np.array(self._prompt_of, np.int64)
        del self._parts, self._prompts, self._prompt_of

    def containing(self, wanted: str) -> np.ndarray:
        """Return a mask of the rows that contain this text, ignoring case."""
        needle = _searched(wanted.replace("\0", ""))
        found = self._rows.containing(needle)
        if len(found):
            found |= self._of_prompts.containing(needle)[self._numbers]
        return found


def _searched(text: str) -> bytes:
    return text.lower().encode("utf-8", "replace")


class _Scanned:
    """Concatenated texts, each followed by a zero byte."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._whole = b"\0".join([*parts, b""])
        self._starts = np.cumsum([0, *(len(part) + 1 for part in parts)])

    def containing(self, needle: bytes) -> np.ndarray:
        """Return a mask of the texts that contain the needle, which must not contain a zero
        byte."""
        found = np.zeros(len(self._starts) - 1, bool)
        at = self._whole.find(needle)
        while 0 <= at < len(self._whole):
            next_text = int(np.searchsorted(self._starts, at, "right"))
            found[next_text - 1] = True
            at = self._whole.find(needle, int(self._starts[next_text]))
        return found
