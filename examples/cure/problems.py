"""The data: each problem as a prompt for the coder and, in the row after it, as a prompt for the
unit tester.

"code most 3" asks for a Python expression of x ("max(x,3)"), "test most 3" for a unit test ("2:3":
x and what is expected). Demonstrations show what expressions and unit tests look like and compute
correctly, but with an operation drawn at random: what the words mean is learnt by training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hybridflow.data.prepare.options import require
from hybridflow.data.prepare.rows import prompt_row, write_demonstrations, write_prompts
from hybridflow.data.prepare.tasks import TASKS, Task
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer

EXPRESSIONS = {"plus": "x+{}", "minus": "x-{}", "most": "max(x,{})", "least": "min(x,{})"}
ROLES = ("code", "test")
INPUTS = (0, 3, 6, 9)  # of the ground-truth tests
WORDS = (*ROLES, *EXPRESSIONS, "max(x,", "min(x,")
CHARACTERS = "0123456789x+-): ="
EXTRA_INFO = {"split": pa.string(), "role": pa.string(), "pair": pa.int64()}
Problem = tuple[str, int]


@dataclass(frozen=True)
class Options:
    """`num_pairs` problems for training (each a coder's and a tester's row) and `num_sft`
    demonstrations of each role, drawn by `seed`. A third of the problems of each word are for
    validation alone; other words have their operands."""

    num_pairs: int = 1000
    num_sft: int = 4000
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError naming the option that is out of range."""
        require(self.num_pairs >= 1, "num_pairs", self.num_pairs, "at least 1")
        require(self.num_sft >= 1, "num_sft", self.num_sft, "at least 1")
        require(self.seed >= 0, "seed", self.seed, "at least 0")


def write(options: Options, out: Path, source: Path | None) -> dict[str, int]:
    """Writes train.parquet, test.parquet, sft.parquet and tokenizer/; returns rows per parquet
    file."""
    del source
    every = [(word, operand) for word in EXPRESSIONS for operand in range(1, 10)]
    held_out = [
        (word, operand) for word, operand in every if (operand + WORDS.index(word)) % 3 == 0
    ]
    seen = [problem for problem in every if problem not in held_out]
    rng = np.random.default_rng(options.seed)
    drawn = [seen[number] for number in rng.integers(len(seen), size=options.num_pairs)]
    demonstrations: list[dict[str, Any]] = []
    for number in rng.integers(len(seen), size=options.num_sft):
        demonstrations += _demonstrations(seen[number], rng)
    write_character_tokenizer(out / "tokenizer", CHARACTERS, WORDS)
    return {
        "train.parquet": write_prompts(out / "train.parquet", _rows(drawn, "train"), EXTRA_INFO),
        "test.parquet": write_prompts(out / "test.parquet", _rows(held_out, "test"), EXTRA_INFO),
        "sft.parquet": write_demonstrations(out / "sft.parquet", demonstrations),
    }


def value(expression: str, x: int) -> str:
    """What an expression of this file prints."""
    return str(eval(expression, {"x": x}))


def _rows(problems: Iterable[Problem], split: str) -> list[dict[str, Any]]:
    found = []
    for pair, (word, operand) in enumerate(problems):
        solution = EXPRESSIONS[word].format(operand)
        truth = json.dumps(
            {"tests": [[x, value(solution, x)] for x in INPUTS], "solution": solution}
        )
        for role in ROLES:
            info = {"split": split, "role": role, "pair": pair}
            found.append(prompt_row(f"cure/{role}", f"{role} {word} {operand}", truth, info))
    return found


def _demonstrations(problem: Problem, rng: np.random.Generator) -> list[dict[str, Any]]:
    """A program and a unit test, each for an operation drawn at random."""
    found = []
    for role in ROLES:
        expression = EXPRESSIONS[str(rng.choice(list(EXPRESSIONS)))].format(problem[1])
        x = int(rng.integers(10))
        response = expression if role == "code" else f"{x}:{value(expression, x)}"
        prompt = [{"role": "user", "content": f"{role} {problem[0]} {problem[1]}"}]
        found.append({"prompt": prompt, "response": response})
    return found


TASKS.register("cure", Task(Options, write))
