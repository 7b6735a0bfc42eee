"""Conversion of datasets from the Hugging Face hub to prompts.

A dataset is read from the cache that `hf download --repo-type dataset ORG/NAME` fills, or from a
folder of its files. Duplicate questions are dropped: DAPO-Math-17k repeats each question about 100
times.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config import hub
from hybridflow.config.entries import PREPARATIONS, Preparation
from hybridflow.data.prepare.options import KEY, require
from hybridflow.errors import ConfigError, DataError
from hybridflow.rewards.reading import last_box

if TYPE_CHECKING:
    from hybridflow.data.files import Row

log = logging.getLogger(__name__)
BOXED = r"Reason step by step, and put the final answer within \boxed{}."


@dataclass(frozen=True)
class PublishedOptions:
    """Options shared by the tasks that read a published dataset (`data.prepare.options`).

    Attributes:
        max_rows: use only the first `max_rows` rows of each split; -1 uses all.
        instruction: appended to plain-text questions; null uses the task's default.
        evaluate: other tasks of this kind; the held-out rows of each are written to TASK.parquet.
    """

    max_rows: int = -1
    instruction: str | None = None
    evaluate: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise a ConfigError that names the option if one is out of range."""
        require(
            self.max_rows >= -1 and self.max_rows != 0,
            "max_rows",
            self.max_rows,
            "positive, or -1 for all",
        )


@dataclass(frozen=True)
class Prompt:
    """The prompt that a dataset's `convert` returns.

    Attributes:
        question: text of the user message, or a list of messages.
        ground_truth: the reference answer for the verifier of `data_source`.
    """

    data_source: str
    question: str | Sequence[Mapping[str, Any]]
    ground_truth: Any
    ability: str = "math"


@dataclass(frozen=True)
class Published:
    """A dataset on the Hugging Face hub.

    Attributes:
        repository: its hub id.
        columns: columns that `convert` reads; every file must have them.
        convert: converts a row to a prompt, or returns None to skip it; raises DataError if the row
            is malformed.
        instruction: appended to plain-text questions.
        splits: the available splits: `train`, `test` or both.
        subset: the only folder in the snapshot to read.
        optional: columns that a file may lack.
    """

    repository: str
    columns: tuple[str, ...]
    convert: Callable[[Row], Prompt | None]
    instruction: str = ""
    splits: tuple[str, ...] = ("train", "test")
    subset: str = ""
    optional: tuple[str, ...] = ()

    def files(self, split: str, source: Path | None) -> list[Path]:
        """Return the files of one split, from `source` or from the cache. Empty if there are
        none."""
        folder = hub.cached(self.repository, "dataset") if source is None else self._below(source)
        return [] if folder is None else hub.split_files(folder, split, subset=self.subset)

    def _below(self, source: Path) -> Path | None:
        """Return the subfolder of `source` named after the dataset, or `source` itself."""
        named = source / self.repository.rpartition("/")[2]
        return named if named.is_dir() else source

    def prompts(self, files: Sequence[Path], options: PublishedOptions) -> Iterator[Prompt]:
        """Yield the prompts of these files without duplicate questions. Raises DataError if a row
        is malformed."""
        from hybridflow.data.files import read_rows

        seen: set[str] = set()
        repeated = left_out = 0
        for row in chain.from_iterable(
            read_rows(file, self.columns, self.optional) for file in files
        ):
            prompt = self.convert(row)
            if prompt is None:
                left_out += 1
                continue
            key = json.dumps(prompt.question, sort_keys=True)
            if key in seen:
                repeated += 1
                continue
            seen.add(key)
            yield prompt
            if len(seen) == options.max_rows:
                break
        if repeated or left_out:
            log.info(
                "%s: skipped %d duplicate rows and %d rows that the task does not use",
                self.repository,
                repeated,
                left_out,
            )


def register(name: str, published: Published, tokenizer: bool = False) -> None:
    """Register the task `name`, which writes train.parquet and test.parquet if the dataset has
    these splits.

    Args:
        tokenizer: also write a byte-level tokenizer, for models with random weights.
    """
    reads = _Reads(name, published)
    PREPARATIONS.register(
        name, Preparation(PublishedOptions, partial(_write, reads, tokenizer), published=reads)
    )


@dataclass(frozen=True)
class _Reads:
    """The datasets that a task reads: its own and those listed in `evaluate`."""

    name: str
    own: Published

    def sets(self, options: PublishedOptions) -> dict[str, tuple[Published, tuple[str, ...]]]:
        """Return the dataset and the splits to write, keyed by task."""
        found = {self.name: (self.own, self.own.splits)}
        for other in options.evaluate:
            entry = PREPARATIONS.get(other).published
            if not isinstance(entry, _Reads) or "test" not in entry.own.splits:
                raise ConfigError(
                    f"{KEY}.evaluate: {other} is not a task that reads a published dataset with "
                    "held-out rows"
                )
            if other != self.name:
                found[other] = (entry.own, ("test",))
        return found

    def place(self, name: str, published: Published, source: Path | None) -> Path | None:
        """Return the folder to read a dataset from, or None to read it from the cache. Evaluation
        datasets missing from `source` are read from the cache."""
        if (
            source is None
            or name == self.name
            or (source / published.repository.rpartition("/")[2]).is_dir()
        ):
            return source
        return None

    def missing(self, options: PublishedOptions, source: Path | None) -> Iterator[str]:
        """Yield an error message for each dataset whose files are unavailable."""
        for name, (published, splits) in self.sets(options).items():
            place = self.place(name, published, source)
            lacking = [split for split in splits if not published.files(split, place)]
            if lacking and place is not None:
                yield (
                    f"no files for split {' and '.join(lacking)} in {place}; task {self.name!r} "
                    f"reads {published.repository}: run `hf download --repo-type dataset "
                    f"{published.repository} --local-dir {place}`"
                )
            elif lacking:
                yield (
                    f"data.prepare.task={self.name} reads the dataset {published.repository}, but "
                    f"it is {hub.missing(published.repository, 'dataset')}; or set "
                    "data.prepare.source (`hybridflow prepare`: --source) to a folder with its "
                    "files"
                )

    def fingerprint(self, options: PublishedOptions, source: Path | None) -> dict[str, str]:
        """Return fingerprints keyed by file, or by dataset for cached snapshots, which are
        identified by their commit."""
        from hybridflow.data.prepare.manifest import listed_files

        found: dict[str, str] = {}
        for name, (published, splits) in self.sets(options).items():
            place = self.place(name, published, source)
            if place is None:
                folder = hub.cached(published.repository, "dataset")
                found[published.repository] = folder.name if folder else ""
                continue
            files = []
            for split in splits:
                files.extend(published.files(split, place))
            found |= listed_files(place, [str(file.relative_to(place)) for file in files])
        return found


def _write(
    reads: _Reads, tokenizer: bool, options: PublishedOptions, out: Path, source: Path | None
) -> dict[str, int]:
    import pyarrow as pa

    from hybridflow.data.prepare.rows import write_prompts
    from hybridflow.data.prepare.tokenizer_files import write_byte_tokenizer

    rows = {}
    for name, (published, splits) in reads.sets(options).items():
        for split in splits:
            files = published.files(split, reads.place(name, published, source))
            written = []
            for index, prompt in enumerate(published.prompts(files, options)):
                written.append(
                    _row(prompt, options.instruction, published.instruction, split, index)
                )
            if not written:
                raise DataError(f"{', '.join(map(str, files))}: no usable rows for task {name!r}")
            file = f"{split if name == reads.name else name}.parquet"
            truth = pa.infer_type([row["reward_model"]["ground_truth"] for row in written])
            extra = {"split": pa.string(), "index": pa.int64()}
            rows[file] = write_prompts(out / file, written, extra, truth)
    if tokenizer:
        write_byte_tokenizer(out / "tokenizer")
    return rows


def _row(prompt: Prompt, given: str | None, own: str, split: str, index: int) -> dict[str, Any]:
    messages: Any = prompt.question
    if isinstance(messages, str):
        instruction = own if given is None else given
        messages = [{"role": "user", "content": f"{messages} {instruction}".rstrip()}]
    return {
        "data_source": prompt.data_source,
        "prompt": [{"role": one["role"], "content": one["content"]} for one in messages],
        "ability": prompt.ability,
        "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        "extra_info": {"split": split, "index": index},
    }


# ---- formats shared by several datasets


def problem_with_answer(data_source: str, row: Row) -> Prompt:
    r"""Convert a row {problem, answer or solution}. If there is no answer, the last \boxed{} of the
    solution is used.
    """
    answer = row.values.get("answer")
    if answer is None:
        solution = row.values.get("solution")
        box = last_box(solution) if isinstance(solution, str) else None
        answer = box.content if box else None
    if isinstance(answer, (int, float)):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise row.malformed(
            "answer" if "answer" in row.values else "solution",
            r"an answer, or a solution with the answer in \boxed{}",
        )
    return Prompt(data_source, row.text("problem"), answer.strip())


def rows_of_prompts(row: Row) -> Prompt:
    """Convert a row that is already a prompt: {data_source, prompt, reward_model}."""
    model = row.values["reward_model"]
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        raise row.malformed("reward_model", "a struct {style, ground_truth} with a ground_truth")
    return Prompt(row.text("data_source"), row.messages("prompt"), model["ground_truth"])


def calls_of(code: str, names: Sequence[str]) -> tuple[str, list[Any], list[Any]] | None:
    """Parse tests of the form `assert f(1, 2) == 3` for the verifier `code`.

    Args:
        code: Python source; parsed but not run.
        names: functions that may be called; if empty, only the function called in the first
            assertion.

    Returns:
        (function, arguments of each call, results), or None if an assertion has another form or
        contains values that JSON cannot represent.
    """
    import ast

    try:
        tree = ast.parse(code)
        function = names[0] if names else ""
        given = []
        wanted = []
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assert):
                continue
            test = node.test
            if (
                not isinstance(test, ast.Compare)
                or not isinstance(test.ops[0], ast.Eq)
                or len(test.ops) > 1
            ):
                return None
            call = test.left
            if (
                not isinstance(call, ast.Call)
                or not isinstance(call.func, ast.Name)
                or call.keywords
            ):
                return None
            function = function or call.func.id
            if call.func.id not in (*names, function):
                return None
            given.append(list(map(ast.literal_eval, call.args)))
            wanted.append(ast.literal_eval(test.comparators[0]))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    plain = list(map(_plain_json, (*given, *wanted)))
    return (function, given, wanted) if given and all(plain) else None


def _plain_json(value: Any) -> bool:
    """Return True if the value survives a JSON round trip. Tuples and sets do not."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
