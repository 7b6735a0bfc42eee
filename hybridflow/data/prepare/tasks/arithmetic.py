"""Integer arithmetic written as characters: the prompt is "12+34", the answer "46" (or "64" with
the least significant digit first).

Every pair of operands is one problem. The held-out problems depend only on the operand range and
`holdout_seed`, not on `seed`, so runs with different seeds validate on the same problems and never
train on them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa

from hybridflow.config.keys import AtLeast, Below, NonNegativeInt, PositiveInt
from hybridflow.data.prepare.options import KEY, check_ranges, require
from hybridflow.data.prepare.rows import (
    prompt_row,
    write_demonstrations,
    write_pairs,
    write_prompts,
)
from hybridflow.data.prepare.tasks import TASKS, Task
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.errors import ConfigError

DATA_SOURCE = "arithmetic"
CHARACTERS = "0123456789+-*="
CALCULATOR = "calculator"  # the tool that demonstrations call, in plain tags
_TAG_CHARACTERS = "".join(sorted({*CALCULATOR, *"</>"}))
# larger datasets should be generated on the fly rather than stored in one parquet file
_MAX_ROWS = 5_000_000
_EXTRA_INFO = {
    "split": pa.string(),
    "index": pa.int64(),
    "operation": pa.string(),
    "a": pa.int64(),
    "b": pa.int64(),
}


@dataclass(frozen=True)
class _Operation:
    symbol: str
    apply: Callable[[int, int], int]
    largest: Callable[
        [int, int], int
    ]  # (min_operand, max_operand) -> largest absolute answer, which sets the padded width


_OPERATIONS = {
    "add": _Operation("+", operator.add, lambda low, high: high + high),
    "sub": _Operation("-", operator.sub, lambda low, high: high - low),
    "mul": _Operation("*", operator.mul, lambda low, high: high * high),
}


@dataclass(frozen=True)
class ArithmeticOptions:
    """Options of the task (`data.prepare.options`).

    Attributes:
        operation: add | sub | mul.
        min_operand, max_operand: both operands are drawn from this inclusive range; not negative.
        reverse_answer: write the digits of the answer in reverse, least significant first (a minus
            sign stays in front).
        zero_pad: write operands and answers with a fixed number of digits.
        num_train: prompts for RL, drawn from all pairs that are not held out; -1 takes all of them.
        num_test: held-out pairs, never in train.parquet or sft.parquet.
        num_sft: demonstrations, drawn from all pairs that are not held out (they may also be RL
            prompts); 0 writes no sft.parquet.
        num_calls: number of demonstrations that call the calculator tool in plain-text tags and
            copy its result, two rows each; the tokenizer then includes the characters of the tags.
        num_pairs: preference pairs (right answer, wrong answer) for a reward model. pairs.parquet
            uses prompts that are not held out, several times if there are more pairs than prompts;
            pairs_test.parquet uses the held-out ones. 0 writes neither.
        pair_errors: kind of errors in wrong answers. "any" redraws one or more digits; "near"
            shifts one or more digits by one or two, like the mistakes of a half-trained model. Only
            "near" trains a reward model that can rank such mistakes.
        hold_out_swapped: if a pair (a, b) is held out, also exclude (b, a) from training.
        seed: draws the training prompts and demonstrations.
        holdout_seed: draws the held-out pairs.
    """

    operation: Literal["add", "sub", "mul"] = "add"
    min_operand: NonNegativeInt = 0
    max_operand: Annotated[int, AtLeast(0), Below(10**9)] = 99
    reverse_answer: bool = False
    zero_pad: bool = False
    num_train: int = -1
    num_test: PositiveInt = 500
    num_sft: NonNegativeInt = 0
    num_calls: NonNegativeInt = 0
    num_pairs: NonNegativeInt = 0
    pair_errors: Literal["any", "near"] = "any"
    hold_out_swapped: bool = False
    seed: NonNegativeInt = 1
    holdout_seed: NonNegativeInt = 20260

    def __post_init__(self) -> None:
        """Raise a ConfigError that names the option if one is out of range."""
        check_ranges(self)
        require(
            self.max_operand >= self.min_operand,
            "max_operand",
            self.max_operand,
            f"at least min_operand ({self.min_operand})",
        )
        require(
            self.num_train >= -1 and self.num_train != 0,
            "num_train",
            self.num_train,
            "positive, or -1 for all",
        )
        require(
            self.num_calls <= self.num_sft,
            "num_calls",
            self.num_calls,
            f"0 to num_sft ({self.num_sft})",
        )
        require(
            not self.num_calls or not (self.reverse_answer or self.zero_pad),
            "num_calls",
            self.num_calls,
            "0 with reverse_answer or zero_pad, because the calculator writes plain numbers",
        )


def write(options: ArithmeticOptions, out: Path, source: Path | None) -> dict[str, int]:
    """Write train.parquet, test.parquet, tokenizer/ and optionally demonstrations and pairs.
    Returns the number of rows per parquet file."""
    del source  # the data is generated
    held_out = _held_out(options)
    forbidden = (
        np.union1d(held_out, _swapped(held_out, options))
        if options.hold_out_swapped
        else np.sort(held_out)
    )
    train = _draw(options, forbidden, options.num_train, stream=0, option="num_train")
    rows = {
        "train.parquet": write_prompts(
            out / "train.parquet", _prompts(train, "train", options), _EXTRA_INFO
        ),
        "test.parquet": write_prompts(
            out / "test.parquet", _prompts(held_out, "test", options), _EXTRA_INFO
        ),
    }
    if options.num_sft:
        sft = _draw(options, forbidden, options.num_sft, stream=1, option="num_sft")
        demonstrations = [
            {"prompt": row["prompt"], "response": row["reward_model"]["ground_truth"]}
            for row in _prompts(sft[options.num_calls :], "sft", options)
        ]
        for row in _prompts(sft[: options.num_calls], "sft", options):
            demonstrations += _call_demonstration(row)
        rows["sft.parquet"] = write_demonstrations(out / "sft.parquet", demonstrations)
    if options.num_pairs:
        free = np.setdiff1d(np.arange(_span(options) ** 2), forbidden)
        drawn = np.random.default_rng([options.seed, 2]).choice(
            free, options.num_pairs, replace=options.num_pairs > len(free)
        )
        for name, numbers in (("pairs.parquet", drawn), ("pairs_test.parquet", held_out)):
            rows[name] = write_pairs(out / name, _preferences(numbers, name, options))
    write_character_tokenizer(
        out / "tokenizer", CHARACTERS + (_TAG_CHARACTERS if options.num_calls else "")
    )
    return rows


def _call_demonstration(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return two rows for a conversation with a calculator call: one ends with the call, the other
    with the final answer."""
    question = row["prompt"][0]
    answer = str(row["reward_model"]["ground_truth"])
    call = f"<{CALCULATOR}>{question['content']}</{CALCULATOR}>"
    shown = [question, {"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
    return [{"prompt": [question], "response": call}, {"prompt": shown, "response": answer}]


def problem(a: int, b: int, options: ArithmeticOptions) -> tuple[str, str]:
    """Return the question and the answer as text, e.g. ("12+34", "46")."""
    operation = _OPERATIONS[options.operation]
    answer = operation.apply(a, b)
    digits = str(abs(answer))
    question = f"{a}{operation.symbol}{b}"
    if options.zero_pad:
        width = len(str(options.max_operand))
        question = f"{a:0{width}d}{operation.symbol}{b:0{width}d}"
        digits = digits.zfill(len(str(operation.largest(options.min_operand, options.max_operand))))
    if options.reverse_answer:
        digits = digits[::-1]
    return question, ("-" if answer < 0 else "") + digits


def _span(options: ArithmeticOptions) -> int:
    return options.max_operand - options.min_operand + 1


def _held_out(options: ArithmeticOptions) -> np.ndarray:
    """Return the pair numbers of the held-out problems, [num_test] int64. The pair number of (a, b)
    is (a - min) * span + (b - min)."""
    total = _span(options) ** 2
    if options.num_test >= total:
        raise ConfigError(
            f"{KEY}.num_test is {options.num_test}, but operands "
            f"{options.min_operand}..{options.max_operand} allow only {total} pairs, and some must "
            "remain for training; lower num_test or raise max_operand"
        )
    return np.random.default_rng(options.holdout_seed).choice(
        total, options.num_test, replace=False
    )


def _swapped(pairs: np.ndarray, options: ArithmeticOptions) -> np.ndarray:
    a, b = np.divmod(pairs, _span(options))
    return b * _span(options) + a


def _draw(
    options: ArithmeticOptions, forbidden: np.ndarray, count: int, *, stream: int, option: str
) -> np.ndarray:
    """Draw distinct pair numbers [count] int64 in random order, excluding the sorted `forbidden`.
    A count of -1 draws all."""
    total = _span(options) ** 2
    free = total - len(forbidden)
    wanted = free if count == -1 else count
    if not 0 < wanted <= free:
        raise ConfigError(
            f"{KEY}.{option} is {count}, but only {free} of {total} pairs are not held out; lower "
            f"{option} or num_test, or raise max_operand"
        )
    if wanted > _MAX_ROWS:
        raise ConfigError(f"{KEY}.{option} must be at most {_MAX_ROWS} rows, got {wanted}")
    # Drawing `len(forbidden)` extra pairs leaves enough after removing held-out ones, and keeps the
    # draw uniform.
    candidates = np.random.default_rng([options.seed, stream]).choice(
        total, min(total, wanted + len(forbidden)), replace=False
    )
    return candidates[~np.isin(candidates, forbidden)][:wanted]


def _prompts(pairs: np.ndarray, split: str, options: ArithmeticOptions) -> list[dict[str, Any]]:
    first, second = np.divmod(pairs, _span(options))
    rows = []
    for index, (a, b) in enumerate(
        zip(
            (first + options.min_operand).tolist(),
            (second + options.min_operand).tolist(),
            strict=True,
        )
    ):
        question, answer = problem(a, b, options)
        extra = {"split": split, "index": index, "operation": options.operation, "a": a, "b": b}
        rows.append(prompt_row(DATA_SOURCE, question, answer, extra))
    return rows


def _preferences(pairs: np.ndarray, split: str, options: ArithmeticOptions) -> list[dict[str, Any]]:
    """Build preference rows: the chosen answer is correct, and the rejected one has one or more
    wrong digits, as specified by `pair_errors`."""
    rng = np.random.default_rng([options.seed, 3])
    rows = []
    for row in _prompts(pairs, split, options):
        answer = str(row["reward_model"]["ground_truth"])
        rows.append(
            {
                "prompt": row["prompt"],
                "chosen": answer,
                "rejected": _spoiled(answer, options.pair_errors, rng),
            }
        )
    return rows


def _spoiled(answer: str, errors: str, rng: np.random.Generator) -> str:
    digits = [i for i, character in enumerate(answer) if character.isdigit()]
    while True:
        spoiled = list(answer)
        for position in rng.choice(digits, rng.integers(1, len(digits) + 1), replace=False):
            moved = (
                int(answer[position]) + int(rng.choice((-2, -1, -1, 1, 1, 2)))
                if errors == "near"
                else int(rng.integers(10))
            )
            spoiled[position] = str(moved % 10)
        if (wrong := "".join(spoiled)) != answer:
            return wrong


TASKS.register("arithmetic", Task(ArithmeticOptions, write))
