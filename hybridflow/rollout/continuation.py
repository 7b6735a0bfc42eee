"""Answers that another engine goes on with, after the one that had begun them was lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.batch import ROUTES, DataProto, Jagged
from hybridflow.workers.rollout import CUT_SHORT

_OF_TOKENS = ("response_ids", "response_mask", "rollout_log_probs", "response_versions")


def cut_short(answers: DataProto) -> np.ndarray:
    """Positions of the rows that an engine began, or was to begin, and did not end."""
    return np.flatnonzero(answers["finish_reason"] == CUT_SHORT)


def continued(prompts: DataProto, answers: DataProto) -> DataProto:
    """prompt_ids of each row with the tokens of its answer so far behind them; the other columns stay."""
    asked, begun = prompts.jagged("prompt_ids"), answers.jagged("response_ids")
    rows = [np.concatenate([prompt, tokens]) for prompt, tokens in zip(asked, begun, strict=True)]
    return prompts.with_columns(prompt_ids=Jagged.from_rows(rows, asked.values.dtype))


def joined(answers: DataProto, cut: np.ndarray, rest: DataProto, limit: int) -> DataProto:
    """The answers with the rows at `cut` ended by those of `rest`, in order.

    An answer is `limit` tokens long at most: what a row of `rest` has beyond is left out, and the answer ends there.
    """
    begun, rest = answers.rows(cut).fetch(), rest.fetch()
    room = limit - begun.lengths("response_ids")
    over = np.maximum(rest.lengths("response_ids") - room, 0)
    columns: dict[str, Any] = {}
    for name in _OF_TOKENS:
        before, after = begun.jagged(name), rest.jagged(name)
        rows = [np.concatenate([a, b[:most]]) for a, b, most in zip(before, after, room, strict=True)]
        columns[name] = Jagged.from_rows(rows, before.values.dtype)
    columns["finish_reason"] = np.where(over > 0, "length", rest["finish_reason"]).astype(object)
    versions = [str(row[-1]) if len(row) else "" for row in columns["response_versions"]]
    columns["weight_version"] = np.array(versions, dtype=object)
    if ROUTES in answers:  # the engine that went on has read prompt and beginning, and knows the experts of all of it
        found = rest.jagged(ROUTES)
        rows = [row[: len(row) - beyond] for row, beyond in zip(found, over, strict=True)]
        columns[ROUTES] = Jagged.from_rows(rows, found.values.dtype)
    others = np.setdiff1d(np.arange(len(answers)), cut)
    # columns in the store and columns here do not make one column: after a loss the tokens of all rows are here
    parts = [answers.rows(others).fetch()] * bool(len(others)) + [DataProto.from_columns(columns)]
    return DataProto.concat(parts).reorder(np.argsort(np.concatenate([others, cut]), kind="stable"))
