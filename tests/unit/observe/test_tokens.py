"""The tokens of responses in the report: colours by difference, versions, what was put in, and
hostile text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import Jagged
from hybridflow.observe.report import write_report
from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.tokens import MOST_TOKENS, read_stretches, texts_of

WORDS = [
    "plain ",
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=1>",
    "tool says ",
    "&amp; ",
    "caf",
    "\u00e9",
]


def decode(ids: Any) -> str:
    return "".join(WORDS[number] for number in ids)


def dump(folder: Path, length: int = 6, **columns: Any) -> Path:
    rows: dict[str, Any] = {
        "score": [1.0],
        "response_text": ["as text"],
        "response_ids": Jagged.from_lengths(np.arange(length) % len(WORDS), [length]),
        "response_mask": [[[1, 2], [0, 2], [1, length - 4]]],
        "response_versions": [[[3, 5], [4, length - 5]]],
        "rollout_log_probs": Jagged.from_lengths(np.full(length, -1, np.float32), [length]),
        "old_log_probs": Jagged.from_lengths(
            np.array([-1, 1, 7, 7, -1.005, -1.3, *[-1] * (length - 6)], np.float32), [length]
        ),
    }
    return dump_rollouts(dump_path(folder, 1), rows | columns)


def test_stretches_say_who_made_the_tokens_and_how_far_they_differ(tmp_path: Path) -> None:
    [found] = read_stretches(dump(tmp_path), [0], decode)
    assert [(one.title, len(one.tokens)) for one in found] == [
        ("answer 1, weights 3", 2),
        ("inserted, not trained on", 2),
        ("answer 2, weights 3", 1),
        ("answer 2, weights 4", 1),
    ]
    kinds = [token.kind for one in found for token in one.tokens]
    assert kinds == ["same", "more5", "obs", "obs", "less1", "less4"]
    assert (
        found[0].tokens[1].about == "log p -1.0000 in the engine, 1.0000 in the trainer: +2.0e+00"
    )


def test_long_responses_are_cut_and_other_dumps_have_no_tokens(tmp_path: Path) -> None:
    [found] = read_stretches(dump(tmp_path, MOST_TOKENS + 40), [0], decode)
    assert (
        sum(len(one.tokens) for one in found) == MOST_TOKENS and found[-1].title == "40 more tokens"
    )
    assert read_stretches(dump(tmp_path), [0], None) == [[]]
    path = dump_rollouts(dump_path(tmp_path, 2), {"score": [1.0]})
    assert read_stretches(path, [0], decode) == [[]]
    torn = Jagged.from_lengths(np.zeros(2, np.float32), [2])
    assert read_stretches(dump(tmp_path, rollout_log_probs=torn), [0], decode) == [[]]


def test_a_character_of_several_tokens_is_shown_once_and_the_texts_are_the_whole() -> None:
    data = "na\u00efve \U0001f600 text".encode() * 20

    def bytes_of(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    texts = texts_of(list(data), bytes_of)
    assert len(texts) == len(data) and "".join(texts) == data.decode()
    assert "\ufffd" in "".join(texts_of([0xFF, 65], bytes_of))


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_the_page_shows_and_escapes_tokens(tmp_path: Path, with_tokenizer: bool) -> None:
    dump(tmp_path / "rollouts")
    if with_tokenizer:
        (tmp_path / "model").mkdir()
        vocabulary = {word: number for number, word in enumerate(WORDS)}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": WORDS[0]}
        (tmp_path / "model" / "tokenizer.json").write_text(
            json.dumps({"version": "1.0", "model": model})
        )
    page = write_report(tmp_path).read_text()
    assert "<img" not in page and "<script>" not in page
    if with_tokenizer:
        # and the legend's
        assert '<span class="more5" title="log p -1.0000' in page and page.count('class="obs"') == 3
        assert (
            "answer 2, weights 4" in page
            and "&lt;script&gt;alert(1)" in page
            and "onerror=1&gt;" in page
        )
    else:
        assert "as text" in page and 'class="obs"' not in page
