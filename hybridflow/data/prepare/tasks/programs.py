"""Small Python programs: the prompt is "plus 3 times 2", and the answer is a program that reads a
number, applies these steps and prints the result.

Answers are verified by running them, so any correct program counts. The held-out problems depend
only on the number of steps and `holdout_seed`, not on `seed`. The operations in demonstrations are
random, so they teach the form of a program but not the meaning of the words. The same applies to
the demonstrations of unit tests ("test plus 3 times 2"), which consist of an input and an output in
fenced blocks.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa

from hybridflow.config.keys import AtLeast, AtMost, NonNegativeInt, PositiveInt
from hybridflow.data.prepare.options import check_ranges, require
from hybridflow.data.prepare.rows import prompt_row, write_demonstrations, write_prompts
from hybridflow.data.prepare.tasks import TASKS, Task
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer

DATA_SOURCE = "programs"
_OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", operator.add),
    "minus": ("-", operator.sub),
    "times": ("*", operator.mul),
}
_FENCE = ("```python\n", "\n```")
_READ = "int(input())"
CHARACTERS = "0123456789+-*() ="
WORDS = (*_FENCE, "print(", _READ, *_OPERATIONS)
_TEST = "test "  # begins the prompt of a unit test
_TEST_FENCES = ("```\n", "\n```\n```\n", "\n```")
_LARGEST_INPUT = 9  # of demonstrated unit tests; the smallest is 0
_LARGEST = 9  # largest operand; the smallest is 1
_EXTRA_INFO = {"split": pa.string(), "index": pa.int64()}
Steps = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class ProgramsOptions:
    """Options of the task (`data.prepare.options`).

    Attributes:
        num_steps: number of steps in each problem.
        operations: words that a problem may use.
        num_train, num_test: number of prompts, each a different problem.
        num_sft: number of demonstrations, which pair problems from train.parquet with random
            operations; 0  writes no sft.parquet.
        num_cases: number of inputs on which an answer is run.
        seed: draws the training prompts and demonstrations.
        holdout_seed: draws the held-out problems.
    """

    num_steps: Annotated[int, AtLeast(1), AtMost(4)] = 2
    operations: tuple[Literal["plus", "minus", "times"], ...] = ("plus", "minus", "times")
    num_train: int = 600
    num_test: PositiveInt = 100
    num_sft: NonNegativeInt = 0
    num_unit_tests: NonNegativeInt = 0
    num_cases: Annotated[int, AtLeast(1), AtMost(100)] = 2
    seed: NonNegativeInt = 1
    holdout_seed: NonNegativeInt = 20260

    def __post_init__(self) -> None:
        """Raise a ConfigError that names the option if one is out of range."""
        check_ranges(self)
        require(
            len(set(self.operations)) == len(self.operations) > 0,
            "operations",
            list(self.operations),
            "one or more different words",
        )
        problems = self.num_problems
        require(
            1 <= self.num_train <= problems - self.num_test,
            "num_train",
            self.num_train,
            f"1 to {problems - self.num_test}: of the {problems} problems, "
            f"num_test={self.num_test} are held out",
        )

    @property
    def num_problems(self) -> int:
        """The number of distinct problems with these options."""
        return int((len(self.operations) * _LARGEST) ** self.num_steps)

    def steps(self, number: int) -> list[tuple[str, int]]:
        """Return the steps of the problem with this number."""
        found: list[tuple[str, int]] = []
        for _ in range(self.num_steps):
            number, step = divmod(number, len(self.operations) * _LARGEST)
            found.append((self.operations[step // _LARGEST], step % _LARGEST + 1))
        return found


def write(options: ProgramsOptions, out: Path, source: Path | None) -> dict[str, int]:
    """Write train.parquet, test.parquet, tokenizer/ and optionally sft.parquet and
    unit_tests.parquet. Returns the number of rows per file."""
    del source  # the data is generated
    total = options.num_problems
    held_out = np.random.default_rng(options.holdout_seed).choice(
        total, options.num_test, replace=False
    )
    rng = np.random.default_rng(options.seed)
    drawn = rng.choice(np.setdiff1d(np.arange(total), held_out), options.num_train, replace=False)
    rows = {}
    for split, numbers in (("train", drawn), ("test", held_out)):
        prompts = []
        for index, steps in enumerate(options.steps(int(number)) for number in numbers):
            prompts.append(
                prompt_row(
                    DATA_SOURCE,
                    question(steps),
                    _cases(steps, options.num_cases),
                    {"split": split, "index": index},
                )
            )
        rows[f"{split}.parquet"] = write_prompts(out / f"{split}.parquet", prompts, _EXTRA_INFO)
    for name, count, demonstration in (
        ("sft.parquet", options.num_sft, _program),
        ("unit_tests.parquet", options.num_unit_tests, _unit_test),
    ):
        if count:
            found = _demonstrations(options, rng.choice(drawn, count), demonstration, rng)
            rows[name] = write_demonstrations(out / name, found)
    words = (_TEST, *_TEST_FENCES, *WORDS) if options.num_unit_tests else WORDS
    write_character_tokenizer(out / "tokenizer", CHARACTERS, words)
    return rows


def question(steps: Steps) -> str:
    """Return the problem in words: "plus 3 times 2"."""
    return " ".join(f"{name} {operand}" for name, operand in steps)


def answer(steps: Steps) -> str:
    """Return a program that solves the problem: "print((int(input())+3)*2)" in a fenced block."""
    expression = _READ
    for number, (name, operand) in enumerate(steps):
        expression = (
            f"{expression if number == 0 else f'({expression})'}{_OPERATIONS[name][0]}{operand}"
        )
    return f"{_FENCE[0]}print({expression}){_FENCE[1]}"


def result(steps: Steps, value: int) -> int:
    """Return the output that a correct program prints for this input."""
    for name, operand in steps:
        value = _OPERATIONS[name][1](value, operand)
    return value


def _demonstrations(
    options: ProgramsOptions,
    numbers: np.ndarray,
    demonstration: Callable[[Steps, Steps, np.random.Generator], dict[str, Any]],
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    """Return one demonstration for each of these problem numbers. The operations in the responses
    are random."""
    found = []
    for number in numbers:
        steps = options.steps(int(number))
        found.append(demonstration(steps, _other(steps, options, rng), rng))
    return found


def _program(steps: Steps, solved: Steps, rng: np.random.Generator) -> dict[str, Any]:
    """Return a demonstration that answers the problem `steps` with a program for the problem
    `solved`."""
    return _demonstration(question(steps), answer(solved))


def _unit_test(steps: Steps, solved: Steps, rng: np.random.Generator) -> dict[str, Any]:
    """Return a demonstration that requests a unit test for the problem `steps` and answers with one
    for the problem `solved`."""
    given = int(rng.integers(_LARGEST_INPUT + 1))
    before, between, after = _TEST_FENCES
    test = f"{before}{given}{between}{result(solved, given)}{after}"
    return _demonstration(_TEST + question(steps), test)


def _demonstration(asked: str, response: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": asked}], "response": response}


def _other(
    steps: Steps, options: ProgramsOptions, rng: np.random.Generator
) -> list[tuple[str, int]]:
    """Return steps with the same operands but random operations."""
    drawn = []
    for _, operand in steps:
        drawn.append((str(rng.choice(list(options.operations))), operand))
    return drawn


def _cases(steps: Steps, count: int) -> str:
    """Return the tests of the problem for the verifier `code`: inputs 2, 9, 16, ... and the
    expected outputs."""
    inputs = [2 + 7 * number for number in range(count)]
    outputs = []
    for value in inputs:
        outputs.append(str(result(steps, value)))
    return json.dumps({"inputs": [f"{value}\n" for value in inputs], "outputs": outputs})


TASKS.register("programs", Task(ProgramsOptions, write))
