"""Answers that were cut short and gone on with: nothing lost, nothing twice, nothing beyond the
limit."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Deferred, Jagged, Supports
from hybridflow.engines.base import Completion, Extras, WeightSpan
from hybridflow.rollout.continuation import continued, joined
from hybridflow.workers.requests import CUT_SHORT
from hybridflow.workers.rollout import response_columns

LIMIT = 6


class Far(Deferred):
    """Rows that a worker has put into the store."""

    def __init__(self, rows: Jagged) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> Far:
        return Far(Jagged.from_rows([self.rows.row(int(i)) for i in index], self.rows.values.dtype))

    def fetch(self) -> tuple[Jagged, bool]:
        return self.rows, False

    @property
    def lengths(self) -> np.ndarray:
        return self.rows.lengths

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def concat(self, others: Any) -> Far:
        return Far(Jagged.concat([self.rows, *(other.rows for other in others)]))


def stored(batch: DataProto) -> DataProto:
    """The batch as workers return it: large columns are in the store."""
    jagged = {name: column for name, column in batch.items() if isinstance(column, Jagged)}
    return DataProto.from_columns(
        dict(batch.items()) | {name: Far(column) for name, column in jagged.items()}
    )


def whole(row: int) -> list[int]:
    """The answer of a prompt if nothing is lost."""
    return [10 * row + i for i in range(1 + row % LIMIT)]


def completion(tokens: list[int], reason: str, version: int) -> Completion:
    span = (WeightSpan(str(version), 0, len(tokens)),)
    support = Supports(np.full(len(tokens), 2, np.int32), np.repeat(np.array(tokens, np.int32), 2))
    return Completion(tokens, [-float(token) for token in tokens], reason, span, support=support)


def rows_of(batch: DataProto, name: str) -> list[Any]:
    return [row.tolist() for row in batch.jagged(name)]


def test_any_number_of_losses_gives_the_answers_without_one() -> None:
    random = np.random.default_rng(3)
    prompts = DataProto.from_columns(
        {"prompt_ids": Jagged.from_rows([[row] for row in range(24)], np.int64)}
    )

    def ask(asked: DataProto, version: int) -> DataProto:
        answers = []
        for prompt in asked.jagged("prompt_ids"):
            rest = whole(int(prompt[0]))[len(prompt) - 1 :]
            if version < 5 and random.random() < 0.6:
                answers.append(
                    completion(rest[: random.integers(0, len(rest))], CUT_SHORT, version)
                )
            else:
                answers.append(completion(rest, "stop", version))
        return stored(response_columns(answers, Extras(support=True)))

    found: list[DataProto] = []
    version = 1
    for row in range(24):
        prompt = prompts.rows([row])
        whole_answer = None
        version = 1
        while whole_answer is None or whole_answer["finish_reason"][0] == CUT_SHORT:
            rest = ask(prompt, version).fetch()
            whole_answer = rest if whole_answer is None else joined(whole_answer, rest)
            prompt = continued(prompt, rest)
            version = version + 1
        found.append(whole_answer)
    answers = DataProto.concat(found)
    assert len(set(answers.jagged("response_versions").values.tolist())) > 2
    assert rows_of(answers, "response_ids") == [whole(row) for row in range(24)]
    assert rows_of(answers, "support_sizes") == [[2] * len(whole(row)) for row in range(24)]
    assert rows_of(answers, "support_ids") == [
        np.repeat(whole(row), 2).tolist() for row in range(24)
    ]
    assert rows_of(answers, "rollout_log_probs") == [
        [-float(t) for t in whole(row)] for row in range(24)
    ]
    assert all(row == sorted(row) for row in rows_of(answers, "response_versions"))
    last = [str(row[-1]) for row in rows_of(answers, "response_versions")]
    assert answers["weight_version"].tolist() == last and set(answers["finish_reason"]) == {"stop"}


def test_one_that_never_began_is_asked_anew() -> None:
    prompts = DataProto.from_columns({"prompt_ids": Jagged.from_rows([[7, 8]], np.int64)})
    answers = response_columns([Completion([], [], CUT_SHORT, ())])
    assert rows_of(continued(prompts, answers), "prompt_ids") == [[7, 8]]
    found = joined(answers, response_columns([completion([1], "stop", 4)]))
    assert rows_of(found, "response_ids") == [[1]] and found["weight_version"].tolist() == ["4"]
