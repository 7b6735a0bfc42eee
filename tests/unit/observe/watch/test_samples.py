"""The index of samples and its search, compared with a plain scan of the dumps."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest

from hybridflow.observe.rollouts import dump_path, dump_rollouts, read_rollouts, remove_dumps_after
from hybridflow.observe.watch.index import SampleIndex, group_kinds
from hybridflow.observe.watch.live_run import LiveRun
from hybridflow.observe.watch.query import Query, excerpt, ordered, search
from hybridflow.observe.watch.sample_pages import NotFound, SamplePages, read_messages

WORDS = ["plus", "Plus", "minus", "ÄÖÜ", "äöü", "12+34", "a.b", "%_", "<b>", "\\boxed{46}"]


def write_dump(run: Path, step: int, seed: int = 0, kind: str = "rollouts", rows: int = 24) -> None:
    rng = random.Random(1000 * seed + step)
    dump_rollouts(
        dump_path(run / kind, step),
        {
            "step": [step] * rows,
            "uid": [7 * (row // 4) for row in range(rows)],
            "data_source": [rng.choice(["math", "code"]) for _ in range(rows)],
            "finish_reason": [rng.choice(["stop", "length"]) for _ in range(rows)],
            "prompt_text": [f"{WORDS[row // 4]} in {step}" for row in range(rows)],
            "response_text": [" ".join(rng.choices(WORDS, k=3)) for _ in range(rows)],
            "ground_truth": [rng.choice(["46", None]) for _ in range(rows)],
            "score": [rng.choice([0.0, 1.0, 0.5, float("nan")]) for _ in range(rows)],
            "response_length": [rng.randrange(50) for _ in range(rows)],
            "reward_failure": [rng.choice([None, None, "timed out"]) for _ in range(rows)],
        },
    )


def index_of(run: Path) -> SampleIndex:
    index = SampleIndex(run)
    list(index.refresh())
    return index


def scanned(run: Path, query: Query) -> set[tuple[str, int, int]]:
    """The same search by reading every row."""
    found = set()
    for folder in ("rollouts", "validation"):
        for path in sorted((run / folder).glob("*.parquet")):
            rows = read_rollouts(path)
            for number, row in enumerate(rows):
                if _matches(row, rows, folder, query):
                    found.add((folder, row["step"], number))
    return found


def _matches(row: dict[str, Any], rows: list[dict[str, Any]], kind: str, query: Query) -> bool:
    texts = [row["prompt_text"], row["response_text"], row["ground_truth"], row["reward_failure"]]
    texts = [text and text.lower() for text in texts]
    wanted = query.text.lower()
    group = [
        one["score"] for one in rows if one["uid"] == row["uid"] and one["score"] == one["score"]
    ]
    status = "" if row["score"] != row["score"] else "mixed"
    if status and len(set(group)) == 1:
        status = {1.0: "solved", 0.0: "unsolved"}.get(group[0], "equal")
    low = query.ranges.get("min_score")
    last = query.ranges.get("to_step")
    return (
        any(text is not None and wanted in text for text in texts)
        and query.kind in ("", kind)
        and query.source in ("", row["data_source"])
        and query.finish in ("", row["finish_reason"])
        and query.group in ("", status)
        and query.uid in (None, row["uid"])
        and (not query.failed or row["reward_failure"] is not None)
        and (low is None or row["score"] >= low)
        and (last is None or row["step"] <= last)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_search_finds_what_a_scan_of_all_dumps_finds(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for step in range(1, 4):
        write_dump(tmp_path, step, seed)
    write_dump(tmp_path, 2, seed + 1, "validation", rows=8)
    index = index_of(tmp_path)
    fields = {
        "text": rng.choice(["", *WORDS, "plus in 2", "timed", "no such"]),
        "kind": rng.choice(["", "", "rollouts", "validation"]),
        "source": rng.choice(["", "", "math", "unknown"]),
        "finish": rng.choice(["", "", "length"]),
        "group": rng.choice(["", "", "mixed", "solved", "unsolved", "equal"]),
        "uid": rng.choice(["", "", "7"]),
        "min_score": rng.choice(["", "", "0.5"]),
        "to_step": rng.choice(["", "2"]),
        "failed": rng.choice(["", "1"]),
        "order": rng.choice(["latest", "best score", "shortest"]),
    }
    query, wrong = Query.parse(fields)
    samples = index.samples
    found = search(index, samples, query)
    places = [
        (samples.kinds[samples.kind[one]], int(samples.step[one]), int(samples.row[one]))
        for one in found
    ]
    assert wrong == [] and len(places) == len(set(places))
    assert set(places) == scanned(tmp_path, query)


def test_orders_put_samples_without_the_number_last(tmp_path: Path) -> None:
    write_dump(tmp_path, 1)
    samples = index_of(tmp_path).samples
    for order, sign in (("best score", -1), ("worst score", 1)):
        scores = samples.columns["score"][ordered(samples, np.arange(len(samples)), order)]
        known = scores[~np.isnan(scores)]
        assert np.isnan(scores[len(known) :]).all() and (np.diff(sign * known) >= 0).all()


def test_the_index_follows_new_replaced_and_removed_dumps(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    assert len(index.samples) == 0 and index.version == 0
    for step in (1, 2, 3):
        write_dump(tmp_path, step)
    assert len(list(index.refresh())) == 3 and len(index.samples) == 72
    assert list(index.refresh()) == [] and index.version == 1
    remove_dumps_after(tmp_path / "rollouts", 1)
    write_dump(tmp_path, 2, seed=5, rows=4)
    assert len(list(index.refresh())) == 1 and len(index.samples) == 28
    assert set(index.samples.step.tolist()) == {1, 2}


def test_damaged_and_foreign_files_are_named_and_the_others_indexed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_dump(run, 1)
    write_dump(tmp_path, 2)
    dump_path(run / "rollouts", 2).symlink_to(dump_path(tmp_path / "rollouts", 2))
    dump_path(run / "rollouts", 3).write_bytes(b"PAR1 and no more")
    os.mkfifo(dump_path(run / "rollouts", 4))
    dump_rollouts(dump_path(run / "rollouts", 5), {"other": ["x"], "score": [1.0]})
    index = index_of(run)
    assert {one.step for one in index.samples.dumps} == {1, 5}
    assert len(index.remarks()) == 3
    assert "links to a file outside" in " ".join(index.remarks())
    assert list(index.refresh()) == []  # they are not read again and again


def test_texts_beyond_the_budget_are_not_searched_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.observe.watch.index._MOST_TEXT_BYTES", 2_000)
    for step in range(1, 6):
        write_dump(tmp_path, step)
    index = index_of(tmp_path)
    query, _ = Query.parse({"text": "in"})
    found = index.samples.step[search(index, index.samples, query)]
    assert 0 < len(set(found.tolist())) < 5 and found.max() == 5  # the latest have text
    assert "is not searched" in " ".join(index.remarks())
    assert len(search(index, index.samples, Query())) == 5 * 24


@pytest.mark.parametrize(
    ("scores", "kind"), [([1, 1], 1), ([0, 0], 2), ([0, 1], 3), ([0.5, 0.5], 4), ([np.nan, 1], 1)]
)
def test_a_group_is_told_by_its_scores(scores: list[float], kind: int) -> None:
    found = group_kinds(np.array([3.0, 3.0, 9.0]), np.array([*scores, 0.0]))
    assert found.tolist() == [0 if np.isnan(score) else kind for score in scores] + [2]


@pytest.mark.parametrize(
    "fields",
    [
        {"min_score": "x"},
        {"from_step": "nan"},
        {"uid": "1.5"},
        {"group": "none"},
        {"order": "__class__"},
        {"max_length": "1e999"},
    ],
)
def test_a_wrong_field_is_named_and_not_used(fields: dict[str, str]) -> None:
    query, wrong = Query.parse(fields)
    assert len(wrong) == 1 and query == Query()


def test_an_excerpt_surrounds_the_match() -> None:
    text = "a" * 500 + "NEEDLE" + "b" * 500
    before, match, after = excerpt(text, "needle")
    assert match == "NEEDLE" and before == "…" + "a" * 90 and after == "b" * 90 + "…"
    assert excerpt(text, "nowhere")[1] == "" and excerpt("short", "")[0] == "short"


@pytest.mark.parametrize("text", [None, "", "{", "[1]", '{"role": 1}', "[" * 100_000, 3.5])
def test_a_column_that_is_no_conversation_has_no_messages(text: Any) -> None:
    assert read_messages(text) == []


def test_a_conversation_has_the_roles_and_texts_of_its_messages() -> None:
    text = '[{"role": "assistant", "content": "a"}, {"role": "tool", "content": {"x": 1}}]'
    assert [(one["kind"], one["content"][:3]) for one in read_messages(text)] == [
        ("assistant", "a"),
        ("tool", '{"r'),
    ]


def test_a_prompt_is_the_same_in_all_steps_and_a_group_is_not(tmp_path: Path) -> None:
    for step, prompts in ((1, ["a", "b"]), (2, ["b", "c"]), (3, ["", "b"])):
        rows = {"uid": [0, 1], "prompt_text": prompts, "score": [0.0, step / 4]}
        dump_rollouts(dump_path(tmp_path / "rollouts", step), rows)
    pages = SamplePages(LiveRun(tmp_path), index_of(tmp_path))
    page, _, parts = pages.parts("rollouts", {"text": "b", "order": "earliest"})
    assert page == "watch_rollouts" and len({row["over_steps"] for row in parts["rows"]}) == 1
    assert [row["group"] for row in parts["rows"]] == [
        f"group?kind=rollouts&step={step}&uid={uid}" for step, uid in ((1, 1), (2, 0), (3, 1))
    ]
    fields = dict(parse_qsl(urlsplit(parts["rows"][0]["over_steps"]).query))
    over_steps = pages.parts("prompt", fields)[2]
    assert [(row["step"], row["mean"]) for row in over_steps["rows"]] == [
        (3, "0.75"),
        (2, "0"),
        (1, "0.25"),
    ]
    for wrong in ("", "0", "xyz", "12"):
        with pytest.raises(NotFound):
            pages.parts("prompt", fields | {"prompt": wrong})
