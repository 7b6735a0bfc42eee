"""GSM8K: grade-school word problems. Reads the published train.jsonl and test.jsonl ({"question", "answer"} a line)
from a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridflow.data.prepare.options import require
from hybridflow.data.prepare.rows import prompt_row, write_prompts
from hybridflow.data.prepare.tasks import TASKS, Task
from hybridflow.data.prepare.tokenizer_files import write_byte_tokenizer
from hybridflow.errors import DataError

DATA_SOURCE = "openai/gsm8k"
SOURCE_FILES = ("train.jsonl", "test.jsonl")
INSTRUCTION = 'Think step by step, then give the final answer after "####".'
_MARK = "####"
_EXTRA_INFO = {"split": pa.string(), "index": pa.int64(), "question": pa.string(), "answer": pa.string()}


@dataclass(frozen=True)
class Gsm8kOptions:
    """Options of the task (`data.prepare.options`).

    Attributes:
        max_rows: rows taken from the top of each file; -1 takes all.
    """

    max_rows: int = -1

    def __post_init__(self) -> None:
        """Raises ConfigError when max_rows is neither positive nor -1."""
        require(self.max_rows >= -1 and self.max_rows != 0, "max_rows", self.max_rows, "positive, or -1 for all")


def write(options: Gsm8kOptions, out: Path, source: Path | None) -> dict[str, int]:
    """Writes train.parquet, test.parquet and a byte-level tokenizer/ into `out`; returns rows per parquet file.

    Raises:
        DataError: a line is not a JSON object with the strings question and answer, or its answer lacks "####". Names
        file and line.
    """
    assert source is not None  # `prepare` has checked that the task's source files exist
    rows = {}
    for split in ("train", "test"):
        prompts = []
        for index, (question, answer) in enumerate(_read(source / f"{split}.jsonl")):
            if index == options.max_rows:
                break
            final = answer.rpartition(_MARK)[2].strip().replace(",", "")
            extra = {"split": split, "index": index, "question": question, "answer": answer}
            prompts.append(prompt_row(DATA_SOURCE, f"{question} {INSTRUCTION}", final, extra))
        if not prompts:
            raise DataError(
                f"{source / f'{split}.jsonl'}: no rows; expected one JSON object with question and answer a line"
            )
        rows[f"{split}.parquet"] = write_prompts(out / f"{split}.parquet", prompts, _EXTRA_INFO)
    write_byte_tokenizer(out / "tokenizer")
    return rows


def _read(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (question, answer) of each line; blank lines are skipped."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _parse(line, f"{path}, line {number}")


def _parse(line: bytes, where: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:  # also UnicodeDecodeError
        raise DataError(f"{where}: not valid JSON ({error}); expected an object with question and answer") from error
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
        raise DataError(
            f'{where}: expected an object with the strings "question" and "answer", found {str(row)[:80]!r}'
        )
    if not row["answer"].rpartition(_MARK)[2].strip() or _MARK not in row["answer"]:
        raise DataError(f'{where}: the answer has no final answer after "{_MARK}"')
    return row["question"], row["answer"]


TASKS.register("gsm8k", Task(Gsm8kOptions, write, SOURCE_FILES))
