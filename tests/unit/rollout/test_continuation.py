"""Answers that were cut short and gone on with: nothing lost, nothing twice, nothing beyond the limit."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.batch import ROUTES, DataProto, Deferred, Jagged
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.rollout.continuation import continued, cut_short, joined
from hybridflow.workers.rollout import CUT_SHORT, response_columns

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
    return DataProto.from_columns(dict(batch.items()) | {name: Far(column) for name, column in jagged.items()})


def whole(row: int) -> list[int]:
    """The answer of a prompt if nothing is lost."""
    return [10 * row + i for i in range(1 + row % LIMIT)]


def completion(tokens: list[int], reason: str, version: int) -> Completion:
    span = (WeightSpan(str(version), 0, len(tokens)),)
    return Completion(tokens, [-float(token) for token in tokens], reason, span)


def rows_of(batch: DataProto, name: str) -> list[Any]:
    return [row.tolist() for row in batch.jagged(name)]


def test_any_number_of_losses_gives_the_answers_without_one() -> None:
    random = np.random.default_rng(3)
    prompts = DataProto.from_columns({"prompt_ids": Jagged.from_rows([[row] for row in range(24)], np.int64)})

    def ask(asked: DataProto, version: int) -> DataProto:
        answers = []
        for prompt in asked.jagged("prompt_ids"):
            rest = whole(int(prompt[0]))[len(prompt) - 1 :]
            if version < 5 and random.random() < 0.6:
                answers.append(completion(rest[: random.integers(0, len(rest))], CUT_SHORT, version))
            else:
                answers.append(completion(rest, "stop", version))
        return stored(response_columns(answers))

    answers, version = ask(prompts, 1), 1
    while len(cut := cut_short(answers)):
        version += 1
        answers = joined(answers, cut, ask(continued(prompts.rows(cut), answers.rows(cut)), version), LIMIT)
    assert version > 2
    assert rows_of(answers, "response_ids") == [whole(row) for row in range(24)]
    assert rows_of(answers, "rollout_log_probs") == [[-float(t) for t in whole(row)] for row in range(24)]
    assert all(row == sorted(row) for row in rows_of(answers, "response_versions"))
    last = [str(row[-1]) for row in rows_of(answers, "response_versions")]
    assert answers["weight_version"].tolist() == last and set(answers["finish_reason"]) == {"stop"}


def test_an_answer_ends_at_the_limit() -> None:
    """Answers that go on together have the room of the shortest."""
    answers = response_columns([completion([1, 2, 3, 4], CUT_SHORT, 1), completion([1], CUT_SHORT, 1)])
    rest = response_columns([completion([5, 6, 7, 8, 9], "stop", 2), completion([2, 3, 4, 5, 6], "stop", 2)])
    routes = Jagged.from_rows([np.zeros((n, 1, 1)) for n in (10, 7)], np.int16)  # one prompt token each
    found = joined(
        answers.with_columns(**{ROUTES: routes}), np.array([0, 1]), rest.with_columns(**{ROUTES: routes}), LIMIT
    )
    assert rows_of(found, "response_ids") == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert found["finish_reason"].tolist() == ["length", "stop"]
    assert found.lengths(ROUTES).tolist() == [7, 7]


def test_one_that_never_began_is_asked_anew() -> None:
    prompts = DataProto.from_columns({"prompt_ids": Jagged.from_rows([[7, 8]], np.int64)})
    answers = response_columns([Completion([], [], CUT_SHORT, ())])
    assert rows_of(continued(prompts, answers), "prompt_ids") == [[7, 8]]
    found = joined(answers, np.array([0]), response_columns([completion([1], "stop", 4)]), LIMIT)
    assert rows_of(found, "response_ids") == [[1]] and found["weight_version"].tolist() == ["4"]
