"""The pages about samples: search results, a group, a prompt over all steps, and a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import numpy as np

from hybridflow.errors import DataError
from hybridflow.observe.charts import Chart, Series, draw
from hybridflow.observe.report import Group
from hybridflow.observe.run_folder import decoder_of
from hybridflow.observe.run_samples import read_rows
from hybridflow.observe.tokens import Decode
from hybridflow.observe.watch.index import GROUPS, SampleIndex, Samples
from hybridflow.observe.watch.live_run import LiveRun
from hybridflow.observe.watch.query import ORDERS, PER_PAGE, Query, excerpt, search

_MOST_SIDE_BY_SIDE = 16
_MOST_STEPS = 40  # in the table of a prompt, each read from its dump
_MOST_MESSAGES = 2_000
_MOST_MESSAGES_CHARACTERS = 4 << 20
_FIELDS = (
    "from_step",
    "to_step",
    "min_score",
    "max_score",
    "min_length",
    "max_length",
    "uid",
)
_OTHERS = ("ground_truth", "reward_extra", "reward_failure", "agent_failure")
_PROMPT = re.compile("[0-9a-f]{1,16}")
_PERSONS = {"assistant": "assistant", "tool": "tool", "ipython": "tool"}

Curves = dict[str, list[tuple[float, float | None]]]
Parts = tuple[str, str, dict[str, Any]]  # template, title, its values


class NotFound(Exception):
    """Raised for an address of a page or sample that does not exist. The message is shown to the
    user."""


class SamplePages:
    """Builds the pages from the index and the dumps."""

    def __init__(self, live: LiveRun, index: SampleIndex) -> None:
        self._live = live
        self._index = index
        self._decode: Decode | None = None
        self._pages: dict[str, Callable[[Mapping[str, str]], Parts]] = {
            "rollouts": self._search,
            "group": self._group,
            "prompt": self._prompt,
            "sample": self._sample,
        }

    def parts(self, name: str, fields: Mapping[str, str]) -> Parts:
        """Return the content of a page.

        Raises:
            NotFound: there is no such page or sample.
            DataError: the dump cannot be read.
        """
        if name not in self._pages:
            raise NotFound("There is no such page.")
        return self._pages[name](fields)

    def indexed(self) -> str:
        """Return the number of samples and dumps in the index, as text."""
        samples = self._index.samples
        return f"{len(samples):,} samples in {len(samples.dumps):,} dumps"

    def _search(self, fields: Mapping[str, str]) -> Parts:
        index = self._index
        query, wrong = Query.parse(fields)
        samples = index.samples
        found = search(index, samples, query)
        given = {name: value for name, value in fields.items() if value and name != "page"}
        shown, pages = one_page(found, query.page, "rollouts", given)
        texts = texts_of(samples, shown)
        rows = []
        for sample in shown.tolist():
            rows.append(_result(samples, sample, texts[sample], query.text))
        parts = {
            "query": query,
            "fields": {name: fields.get(name, "") for name in _FIELDS},
            "kinds": samples.kinds,
            "groups": list(GROUPS),
            "sources": list(filter(None, index.known["data_source"])),
            "finishes": list(filter(None, index.known["finish_reason"])),
            "orders": list(ORDERS),
            "wrong": wrong,
            "count": len(found),
            "indexed": self.indexed(),
            "rows": rows,
            **pages,
            "remarks": index.remarks(),
        }
        return "watch_rollouts", "Samples", parts

    def _group(self, fields: Mapping[str, str]) -> Parts:
        samples = self._index.samples
        kind = _kind_of(samples, fields)
        uid = _integer(fields, "uid")
        step = _integer(fields, "step")
        of_step = samples.of_step(kind, step)
        uids = samples.columns["uid"][of_step]
        members = of_step[uids == uid]
        if not len(members):
            raise NotFound(
                f"Step {step} has no group {uid}. Its dump may have "
                "been rewritten by a resumed run, or removed (trainer.keep_rollout_steps)."
            )
        shown = members[:_MOST_SIDE_BY_SIDE]
        rows = self._rows(samples, shown)
        name = samples.kinds[kind]
        before, after = _neighbours(uids, uid, name, step)
        title = f"Group {uid} of step {step}"
        parts = {
            "heading": f"{title} of {name}, {len(members)} samples",
            "rows": rows,
            "has_tokens": any(row["tokens"] for row in rows),
            "left": len(members) - len(shown),
            "all": address("rollouts", kind=name, uid=uid, from_step=step, to_step=step),
            "before": before,
            "after": after,
            "over_steps": _prompt_address(samples, int(members[0])),
        }
        return "watch_group", title, parts

    def _prompt(self, fields: Mapping[str, str]) -> Parts:
        samples = self._index.samples
        kind = _kind_of(samples, fields)
        key = fields.get("prompt", "")
        number = int(key, 16) if _PROMPT.fullmatch(key) else 0
        of_prompt = samples.columns["prompt"] == number
        members = np.flatnonzero((samples.kind == kind) & of_prompt)
        if not number or not len(members):
            raise NotFound("No dump contains samples of this prompt.")
        name = samples.kinds[kind]
        curves, rows = _steps_of(samples, members)
        last = _integer(fields, "to_step") if "to_step" in fields else rows[-1]["step"]
        before = [row for row in rows if row["step"] <= last]
        shown = before[::-1][:_MOST_STEPS]
        self._add_answers(samples, shown)
        after = ""
        left = len(before) - len(shown)
        if left:
            earlier = before[left - 1]["step"]
            after = address("prompt", kind=name, prompt=key, to_step=earlier)
        latest = self._rows(samples, members[-1:])[0]
        parts = {
            "heading": f"One prompt over the steps of {name}",
            "prompt_text": latest["prompt_text"],
            "groups": _score_charts(curves),
            "rows": shown,
            "after": after,
        }
        return "watch_prompt", "One prompt", parts

    def _add_answers(self, samples: Samples, rows: list[dict[str, Any]]) -> None:
        """In each row, replace the indices of the best and worst sample with their text."""
        picked = set()
        for row in rows:
            picked |= {row["best"], row["worst"]}
        texts = texts_of(samples, np.array(sorted(picked), np.int64))
        for row in rows:
            for which in ("best", "worst"):
                response = text_of(texts[row[which]], "response_text")
                row[which] = excerpt(response, "")[0]

    def _sample(self, fields: Mapping[str, str]) -> Parts:
        samples = self._index.samples
        kind = _kind_of(samples, fields)
        row = _integer(fields, "row")
        step = _integer(fields, "step")
        of_step = samples.of_step(kind, step)
        found = of_step[samples.row[of_step] == row]
        if not len(found):
            raise NotFound(f"Sample {row} does not exist in step {step}.")
        name = samples.kinds[kind]
        sample = int(found[0])
        shown = self._rows(samples, found)[0]
        before = ""
        if row:
            before = _sample_address(name, step, row - 1)
        after = ""
        if row + 1 < len(of_step):
            after = _sample_address(name, step, row + 1)
        title = f"Sample {row} of step {step}"
        parts = {
            "heading": f"{title} of {name}",
            "row": shown,
            "messages": read_messages(shown["messages"]),
            "before": before,
            "after": after,
            "group": _group_address(samples, sample),
            "over_steps": _prompt_address(samples, sample),
        }
        return "watch_sample", title, parts

    def _rows(self, samples: Samples, chosen: np.ndarray) -> list[dict[str, Any]]:
        """Read samples of one dump from its file, with their tokens."""
        dump = samples.dump_of(chosen[0])
        numbers = samples.row[chosen].tolist()
        if self._decode is None:
            self._decode = decoder_of(self._live.path)
        rows = read_rows(dump.path, numbers, self._decode)
        for row, number in zip(rows, numbers, strict=True):
            row["row"] = number
            row["address"] = _sample_address(dump.kind, dump.step, number)
        return rows


def one_page(
    found: np.ndarray, wanted: int, path: str, given: Mapping[str, Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the part of the results on a page (the last one if there are fewer), and the template
    values for paging: `given` are the other fields of the address."""
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(wanted, pages)
    end = page * PER_PAGE
    shown = found[end - PER_PAGE : end]
    before = address(path, **given, page=page - 1) if page > 1 else ""
    after = address(path, **given, page=page + 1) if page < pages else ""
    return shown, {"page": page, "pages": pages, "before": before, "after": after}


def texts_of(samples: Samples, chosen: np.ndarray) -> dict[int, Mapping[str, Any]]:
    """Read samples of any dumps, without tokens. Samples that cannot be read are empty, because the
    run may have deleted their dump."""
    found: dict[int, Mapping[str, Any]] = {int(sample): {} for sample in chosen}
    dumps = samples.dump[chosen]
    for number in np.unique(dumps).tolist():
        inside = chosen[dumps == number].tolist()
        numbers = samples.row[inside].tolist()
        with suppress(DataError):
            rows = read_rows(samples.dumps[number].path, numbers, None)
            found |= dict(zip(inside, rows, strict=True))
    return found


def read_messages(text: Any) -> list[dict[str, str]]:
    """Return the messages of a conversation for the page; empty if the column is not a list of
    messages."""
    if not isinstance(text, str) or len(text) > _MOST_MESSAGES_CHARACTERS:
        return []
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(messages, list):
        return []
    if not all(isinstance(one, dict) for one in messages):
        return []
    found = []
    for one in messages[:_MOST_MESSAGES]:
        role = str(one.get("role", ""))[:40]
        kind = _PERSONS.get(role, "other")
        content = one.get("content")
        if not isinstance(content, str):
            content = json.dumps(one, ensure_ascii=False)
        found.append({"role": role, "content": content, "kind": kind})
    return found


def _result(samples: Samples, sample: int, row: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    dump = samples.dump_of(sample)
    number = int(samples.row[sample])
    score = samples.columns["score"][sample]
    length = samples.columns["response_length"][sample]
    others = [row[name] for name in _OTHERS if isinstance(row.get(name), str)]
    return {
        "place": f"{dump.kind} {dump.step}",
        "score": "–" if np.isnan(score) else f"{score:.3g}",
        "length": "–" if np.isnan(length) else f"{length:.0f}",
        "sample": _sample_address(dump.kind, dump.step, number),
        "group": _group_address(samples, sample),
        "over_steps": _prompt_address(samples, sample),
        "prompt_text": excerpt(text_of(row, "prompt_text"), wanted),
        "text": excerpt(text_of(row, "response_text"), wanted),
        "other": excerpt("\n".join(others), wanted),
    }


def _neighbours(uids: np.ndarray, uid: int, kind: str, step: int) -> tuple[str, str]:
    """Return the addresses of the groups before and after a group; empty if there is none."""
    before = ""
    lower = uids[uids < uid]
    if len(lower):
        before = address("group", kind=kind, step=step, uid=int(lower.max()))
    after = ""
    higher = uids[uids > uid]
    if len(higher):
        after = address("group", kind=kind, step=step, uid=int(higher.min()))
    return before, after


def _steps_of(samples: Samples, members: np.ndarray) -> tuple[Curves, list[dict[str, Any]]]:
    """Return the curves of a prompt's scores, and the row of each step in its table."""
    curves: Curves = {"max": [], "mean": [], "min": []}
    rows: list[dict[str, Any]] = []
    steps = samples.step[members]
    for step in np.unique(steps).tolist():
        of_step = members[steps == step]
        scores = np.nan_to_num(samples.columns["score"][of_step])
        mean = float(scores.mean())
        curves["max"].append((step, float(scores.max())))
        curves["mean"].append((step, mean))
        curves["min"].append((step, float(scores.min())))
        rows.append(
            {
                "step": step,
                "group": _group_address(samples, int(of_step[0])),
                "mean": f"{mean:.3g}",
                "count": len(of_step),
                "best": int(of_step[scores.argmax()]),
                "worst": int(of_step[scores.argmin()]),
            }
        )
    return curves, rows


def _score_charts(curves: Curves) -> list[Group]:
    series = [
        Series("max", curves["max"], 1),
        Series("mean", curves["mean"], 0),
        Series("min", curves["min"], 2),
    ]
    about = f"steps: {len(curves['mean'])}"
    chart = draw(Chart("Score of this prompt's samples", series, "score", about))
    return [("Scores", [chart])] if chart else []


def _sample_address(kind: str, step: int, row: int) -> str:
    return address("sample", kind=kind, step=step, row=row)


def _group_address(samples: Samples, sample: int) -> str:
    """Return the address of a sample's group; empty if it has none."""
    dump = samples.dump_of(sample)
    uid = samples.columns["uid"][sample]
    if np.isnan(uid):
        return ""
    return address("group", kind=dump.kind, step=dump.step, uid=int(uid))


def _prompt_address(samples: Samples, sample: int) -> str:
    """Return the address of the page about a sample's prompt over the steps; empty if it has
    none."""
    dump = samples.dump_of(sample)
    prompt = int(samples.columns["prompt"][sample])
    if not prompt:
        return ""
    return address("prompt", kind=dump.kind, prompt=f"{prompt:x}")


def text_of(row: Mapping[str, Any], name: str) -> str:
    """Return a text column of a row; empty if it is missing."""
    value = row.get(name)
    return value if isinstance(value, str) else ""


def address(path: str, **fields: Any) -> str:
    """Return the relative address of a page with these query fields."""
    return f"{path}?{urlencode(fields)}"


def _kind_of(samples: Samples, fields: Mapping[str, str]) -> int:
    kind = fields.get("kind", "rollouts")
    if kind not in samples.kinds:
        raise NotFound(f"There are no dumps in {kind}/ yet.")
    return samples.kinds.index(kind)


def _integer(fields: Mapping[str, str], name: str) -> int:
    text = fields.get(name, "")
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise NotFound(f"{name} in the address must be a number.")
    return int(text)
