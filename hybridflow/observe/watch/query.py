"""Search and filters over the samples of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridflow.observe.watch.index import GROUPS, SampleIndex, Samples

PER_PAGE = 25
ORDERS = {
    "latest": ("step", True),
    "earliest": ("step", False),
    "best score": ("score", True),
    "worst score": ("score", False),
    "longest": ("response_length", True),
    "shortest": ("response_length", False),
    "largest advantage": ("advantage", True),
    "smallest advantage": ("advantage", False),
    "largest log-prob difference": ("logprob_diff_mean", True),
    "most turns": ("turns", True),
}
# name of the field -> (column, True for a lower bound)
_RANGES = {
    "from_step": ("step", True),
    "to_step": ("step", False),
    "min_score": ("score", True),
    "max_score": ("score", False),
    "min_length": ("response_length", True),
    "max_length": ("response_length", False),
}
_NOWHERE = -2  # the index of no name; -1 is the code of a name that is not indexed
_MOST_DIGITS = 300
_MOST_TEXT = 1_000


@dataclass(frozen=True)
class Query:
    """A search, parsed from the address of the page.

    Attributes:
        text: text to find in the prompt, response, ground truth or the reward's extra values,
            ignoring case.
        kind: folder of the dumps; empty for all.
        ranges: bounds keyed by the name of their field.
        source, finish: a data source and a finish reason; empty for all.
        group: a key of `GROUPS`; empty for all.
        uid: number of the group within its step; None for all.
        failed: True for samples whose scoring or agent loop failed.
    """

    text: str = ""
    kind: str = ""
    ranges: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    finish: str = ""
    group: str = ""
    uid: int | None = None
    failed: bool = False
    order: str = "latest"
    page: int = 1

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> tuple[Query, list[str]]:
        """Return the query encoded in the fields of an address, and a sentence for each invalid
        field."""
        wrong: list[str] = []
        ranges = _ranges_of(fields, wrong)
        for name, choices in (("group", GROUPS), ("order", ORDERS)):
            if fields.get(name, "") not in ("", *choices):
                wrong.append(f"{name}: choose one of {', '.join(choices)}")
        group = fields.get("group", "")
        order = fields.get("order", "")
        found = cls(
            text=fields.get("text", "")[:_MOST_TEXT],
            kind=fields.get("kind", ""),
            ranges=ranges,
            source=fields.get("source", ""),
            finish=fields.get("finish", ""),
            group=group if group in GROUPS else "",
            uid=_uid_of(fields, wrong),
            failed=fields.get("failed", "") == "1",
            order=order if order in ORDERS else "latest",
            page=page_number(fields),
        )
        return found, wrong


def _uid_of(fields: Mapping[str, str], wrong: list[str]) -> int | None:
    """Return the group number in the fields, and add a sentence to `wrong` if it is invalid."""
    text = fields.get("uid", "")
    if not text.strip():
        return None
    value = _number(text)
    if value is None or not value.is_integer():
        wrong.append(f"group number: {text!r} is not a number")
        return None
    return int(value)


def _ranges_of(fields: Mapping[str, str], wrong: list[str]) -> dict[str, float]:
    """Return the bounds in the fields, and add a sentence to `wrong` for each invalid one."""
    ranges: dict[str, float] = {}
    for name in _RANGES:
        text = fields.get(name, "")
        if text.strip():
            value = _number(text)
            if value is not None:
                ranges[name] = value
            else:
                label = name.replace("_", " ")
                wrong.append(f"{label}: {text!r} is not a number")
    return ranges


def page_number(fields: Mapping[str, str]) -> int:
    """Return the page of results that an address asks for, at least 1."""
    number = _number(fields.get("page", "1"))
    return max(1, int(number or 1))


def search(index: SampleIndex, samples: Samples, query: Query) -> np.ndarray:
    """Return the matching samples, as indices into the snapshot, in the query's order."""
    return ordered(samples, matching(index, samples, query), query.order)


def matching(index: SampleIndex, samples: Samples, query: Query) -> np.ndarray:
    """Return the indices of the matching samples in ascending order."""
    kept = np.ones(len(samples), bool)
    if not len(samples):
        return np.flatnonzero(kept)
    if query.kind:
        kept &= samples.kind == _index_in(samples.kinds, query.kind)
    for name, value in query.ranges.items():
        column, is_lower = _RANGES[name]
        values = _column(samples, column)
        kept &= (values >= value) if is_lower else (values <= value)
    for name, wanted in (("data_source", query.source), ("finish_reason", query.finish)):
        if wanted:
            kept &= samples.columns[name] == _index_in(index.known[name], wanted)
    if query.group:
        kept &= samples.columns["group"] == GROUPS[query.group]
    if query.uid is not None:
        kept &= samples.columns["uid"] == query.uid
    if query.failed:
        kept &= samples.columns["failed"]
    found = np.flatnonzero(kept)
    return _containing(samples, found, query.text) if query.text else found


def ordered(samples: Samples, found: np.ndarray, order: str) -> np.ndarray:
    """Sort the samples by one of `ORDERS`. Samples without a value come last."""
    column, descending = ORDERS[order]
    if not len(found):
        return found
    values = _column(samples, column)[found].astype(np.float64)
    return found[np.argsort(-values if descending else values, kind="stable")]


def excerpt(text: str, wanted: str, around: int = 90) -> tuple[str, str, str]:
    """Return the part of a text around the first match, as (before, match, after). Without a match,
    `before` is the start of the text."""
    match = re.search(re.escape(wanted), text, re.IGNORECASE) if wanted else None
    if match is None:
        return _shortened(text, 2 * around), "", ""
    start = max(0, match.start() - around)
    before = text[start : match.start()]
    if start:
        before = f"…{before}"
    return before, match[0], _shortened(text[match.end() :], around)


def _shortened(text: str, most: int) -> str:
    """Return the first characters of a text, with an ellipsis if there are more."""
    return f"{text[:most]}…" if len(text) > most else text


def _containing(samples: Samples, found: np.ndarray, wanted: str) -> np.ndarray:
    of_dump = samples.dump[found]
    kept = np.zeros(len(found), bool)
    for number in np.unique(of_dump).tolist():
        texts = samples.dumps[number].texts
        if texts is not None:
            inside = of_dump == number
            rows = samples.row[found[inside]]
            kept[inside] = texts.containing(wanted)[rows]
    return found[kept]


def _column(samples: Samples, name: str) -> np.ndarray:
    return samples.step if name == "step" else samples.columns[name]


def _index_in(names: Sequence[str], wanted: str) -> int:
    """Return the index of a name; `_NOWHERE` if it is missing."""
    return names.index(wanted) if wanted in names else _NOWHERE


def _number(text: str) -> float | None:
    try:
        value = float(text[:_MOST_DIGITS])
    except ValueError:
        return None
    return value if math.isfinite(value) else None
