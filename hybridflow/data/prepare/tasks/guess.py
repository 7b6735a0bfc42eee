"""A number-guessing game for the environment `guess`: the prompt is a range such as "0-9", and the
ground truth is a number in it.

The training and test sets use the same numbers. Nothing needs to be held out, because the policy
can only succeed by using the environment's replies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa

from hybridflow.config.keys import AtLeast, AtMost, NonNegativeInt, PositiveInt
from hybridflow.data.prepare.options import check_ranges
from hybridflow.data.prepare.rows import prompt_row, write_demonstrations, write_prompts
from hybridflow.data.prepare.tasks import TASKS, Task
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer

DATA_SOURCE = "guess"
CHARACTERS = "0123456789+-=?"
_EXTRA_INFO = {"split": pa.string(), "index": pa.int64()}


@dataclass(frozen=True)
class GuessOptions:
    """Options of the task (`data.prepare.options`).

    Attributes:
        largest: the largest number; the smallest is 0.
        num_train, num_test: number of prompts.
        num_sft: demonstrations for a warm start: games with random guesses, each cut off after a
            random number of guesses; 0 writes none.
        max_guesses: maximum number of guesses in these games.
        seed: seed for all random draws.
    """

    largest: Annotated[int, AtLeast(1), AtMost(10**6 - 1)] = 9
    num_train: PositiveInt = 2000
    num_test: PositiveInt = 200
    num_sft: NonNegativeInt = 0
    max_guesses: PositiveInt = 4
    seed: NonNegativeInt = 1

    def __post_init__(self) -> None:
        """Raise a ConfigError that names the option if one is out of range."""
        check_ranges(self)


def write(options: GuessOptions, out: Path, source: Path | None) -> dict[str, int]:
    """Write train.parquet, test.parquet, tokenizer/ and optionally sft.parquet. Returns the number
    of rows per file."""
    del source  # the data is generated
    rng = np.random.default_rng(options.seed)
    rows = {}
    for split, count in (("train", options.num_train), ("test", options.num_test)):
        numbers = rng.integers(options.largest + 1, size=count).tolist()
        prompts = []
        for index, number in enumerate(numbers):
            prompts.append(
                prompt_row(
                    DATA_SOURCE, _question(options), str(number), {"split": split, "index": index}
                )
            )
        rows[f"{split}.parquet"] = write_prompts(out / f"{split}.parquet", prompts, _EXTRA_INFO)
    if options.num_sft:
        games = [_game(options, rng) for _ in range(options.num_sft)]
        rows["sft.parquet"] = write_demonstrations(out / "sft.parquet", games)
    write_character_tokenizer(out / "tokenizer", CHARACTERS)
    return rows


def _question(options: GuessOptions) -> str:
    return f"0-{options.largest}"


def _game(options: GuessOptions, rng: np.random.Generator) -> dict[str, Any]:
    """Draw an unfinished game: its messages so far are the prompt, and the next guess is the
    response."""
    number = int(rng.integers(options.largest + 1))
    messages = [{"role": "user", "content": _question(options)}]
    for _ in range(int(rng.integers(options.max_guesses))):
        guess = int(rng.integers(options.largest + 1))
        if guess == number:
            break
        messages.append({"role": "assistant", "content": str(guess)})
        messages.append({"role": "tool", "content": "+" if guess < number else "-"})
    return {"prompt": messages, "response": str(rng.integers(options.largest + 1))}


TASKS.register("guess", Task(GuessOptions, write))
