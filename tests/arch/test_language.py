"""Docstrings are sentences or noun phrases, they say something themselves, and no name is a private
word."""

from __future__ import annotations

import pytest

from tests.arch.files import ROOT, nodes, python_files
from tests.arch.language import docstring_problem, findings

FOLDERS = ("hybridflow", "benchmarks", "examples", "tests")


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(folder, marks=[pytest.mark.slow] if folder == "tests" else [])
        for folder in FOLDERS
    ],
)
def test_the_language_is_plain(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for path in python_files(folder)
        for text in (path.read_text(encoding="utf-8"),)
        for line, problem in findings(text, path.stem, nodes(text))
    }
    assert sorted(found) == []


@pytest.mark.parametrize(
    "text",
    [
        "Of the model.",
        "Of a pair: a header and the slots.",
        "See `WeightSource.read`; in the precision of the checkpoint.",
        "As above (distributed/parallel_state.py:1151).",
        "Those of a peer, as it sent them.",
        "Those of a rank's `tensors` that have adapters.",
        "Whose turn it is at one router.",
        "For `Residency`.",
        "On the wire.",
    ],
)
def test_a_fragment_and_a_pointer_are_seen(text: str) -> None:
    assert docstring_problem(text)


@pytest.mark.parametrize(
    "text",
    [
        "The model's tensors.",
        "Seeds of all ranks.",
        "Whether the ranks have ended.",
        "Which ranks send to which engine.",
        "From now on these engines, and no others, get no requests; `stale` says why.",
        "Those who wait for the bad rank say so; nobody hangs.",
        "Its process is there and does nothing.",
        "On CPU nothing is freed; the engine must go on answering.",
        "At most `max_prompt_length` ids, cut where `data.truncation` says.",
    ],
)
def test_a_sentence_or_a_noun_phrase_is_fine(text: str) -> None:
    assert docstring_problem(text) is None


@pytest.mark.parametrize(
    "source",
    [
        "class _Course: ...",
        "def f(seat): ...",
        "self.fate = 1",
        "log_of_life = 1",
        "beside = {}",
        "def gone(): ...",
        "# the fate of an order",
        '"""An engine in its second life."""',
        "def test_a_bell_rings(): ...",
    ],
)
def test_a_private_word_is_seen(source: str) -> None:
    assert list(findings(source))


@pytest.mark.parametrize(
    "source",
    [
        "lifetime = 1",
        "returns = 2",
        "def test_a_write_turns_into_an_error(): ...",
        "# in the course of a step",
        '"""The index lies beside the shards, as long as it lives."""',
    ],
)
def test_other_words_are_fine(source: str) -> None:
    assert not list(findings(source))


def test_a_module_named_by_a_private_word_is_seen() -> None:
    assert list(findings("x = 1", "bell")) and not list(findings("x = 1", "notification"))
