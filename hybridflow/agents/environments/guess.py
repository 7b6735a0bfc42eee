"""A number-guessing game. The observation after a wrong guess is `+` (the number is larger) or `-`
(it is smaller).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.agents.environments.base import Step, environment


@environment("guess")
class Guess:
    """An episode in which the number to guess is the row's ground truth. The correct guess earns a
    reward of 1, any other answer 0. If an answer is not a number, the observation is `?`.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        """Read the number from the row."""
        self.number = int(row["ground_truth"])

    def step(self, answer: str) -> Step:
        """Compare the guess with the number."""
        text = answer.strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            return Step("?")
        guess = int(text)
        if guess == self.number:
            return Step("", 1.0, done=True)
        return Step("+" if guess < self.number else "-")
