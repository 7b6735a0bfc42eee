"""A number to be guessed: each wrong guess is answered with `+` (it is larger) or `-` (it is
smaller)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.agents.environments.base import Step, environment


@environment("guess")
class Guess:
    """The ground truth of the row is the number. The guess that finds it has reward 1, any other 0;
    an answer that is no number is shown `?`."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Take the number from the row."""
        self.number = int(row["ground_truth"])

    def step(self, answer: str) -> Step:
        """Compare a guess with the number."""
        text = answer.strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            return Step("?")
        guess = int(text)
        if guess == self.number:
            return Step("", 1.0, done=True)
        return Step("+" if guess < self.number else "-")
