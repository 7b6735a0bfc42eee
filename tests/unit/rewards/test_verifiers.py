"""The built-in verifiers: what they read from a response, and that verl's names of data sources are
known."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards import RewardManager
from hybridflow.rewards.functions import matching
from hybridflow.rewards.verifiers.base import VERIFIERS, by_data_source

# of verl 0.9.1's default_compute_score
VERL_SOURCES = {
    "gsm8k": ("openai/gsm8k",),
    "math": (
        *(
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "HuggingFaceH4/MATH-500",
            "math_dapo",
            "math",
        ),
        *(
            "math_dapo_reasoning",
            "aime2024",
            "aime_2025",
            "numina_aops_forum",
            "numina_synthetic_math",
        ),
        *("numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
    ),
    "code": ("codecontests", "apps", "codeforces", "taco"),
    "geo3k": ("hiyouga/geometry3k",),
    "question": (
        *(
            "searchR1_nq",
            "searchR1_triviaqa",
            "searchR1_popqa",
            "searchR1_hotpotqa",
            "searchR1_2wikimultihopqa",
        ),
        *("searchR1_musique", "searchR1_bamboogle"),
    ),
}


def score(name: str, response: str, truth: Any, **options: Any) -> float:
    return float(VERIFIERS.get(name).function(response, truth, **options).score)


def test_data_sources_of_verl_have_their_verifier() -> None:
    known = by_data_source()
    for name, sources in VERL_SOURCES.items():
        for source in sources:
            assert known[str(matching(source, known))] is VERIFIERS.get(name), source


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is C.", "C"),
        ("Answer: (b)\nNo, wait. Answer: **B**", "B"),
        (r"so \boxed{D}", "D"),
        (r"so \boxed{\text{D}}", "D"),
        ("Option A is wrong, option B too. The answer is D", "D"),
        ("(A)", "A"),
        ("I think it is B.", "B"),
        ("C", "C"),
        ("Final answer: A) 12 apples", "A"),
        ("The answer is Carbon", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_choice(response: str, letter: str | None) -> None:
    found = VERIFIERS.get("choice").function(response, "A")
    assert found.extra == {"answer": letter} and found.score == (letter == "A")


def test_a_choice_needs_a_letter() -> None:
    assert score("choice", "Answer: C", "(c)") == 1
    with pytest.raises(ValueError, match="'12' is neither a letter"):
        score("choice", "Answer: C", "12")


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>a</think> <answer>b</answer>", True),
        ("\n<think>a\nb</think>\n\n<answer>c</answer>\n", True),
        ("<think>a</think><answer></answer>", False),
        ("<think> </think><answer>b</answer>", False),
        # the prompt is not known, and may have opened the thinking
        ("a</think>\n<answer>b</answer>", True),
        ("<think>a</think><answer>b</answer> more", False),
        ("x <think>a</think><answer>b</answer>", False),
        ("<think>a</think> x <answer>b</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<think>a</think></think><answer>b</answer>", False),
        ("<think>a</think>", False),
        ("", False),
    ],
)
def test_format(response: str, right: bool) -> None:
    assert score("format", response, None) == right


def test_format_with_other_sections() -> None:
    assert score("format", "<plan>a</plan>", None, sections=("plan",)) == 1


def test_regex() -> None:
    assert (
        score("regex", "it is 42 today", r"\b42\b") == 1 and score("regex", "142", r"\b42\b") == 0
    )
    assert (
        score("regex", " 42\n", r"\d+", whole=True) == 1
        and score("regex", "42 x", r"\d+", whole=True) == 0
    )
    with pytest.raises(ValueError, match="not a valid regular expression"):
        score("regex", "x", "(")


def test_question() -> None:
    truth = {"target": ["The Beatles", "Beatles"]}
    assert score("question", "<answer>x</answer> <answer> the  beatles!</answer>", truth) == 1
    assert score("question", "<answer>the beatles</answer><answer>Stones</answer>", truth) == 0
    assert score("question", "the beatles", truth) == 0
    assert score("question", "<answer>Paris</answer>", {"target": "paris"}) == 1


# ---- a package that may be missing


def test_a_missing_package_is_one_message_before_the_first_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    manager = RewardManager(RewardConfig(processes=0))
    with pytest.raises(
        ConfigError, match=r"'math'.*needs the Python package math-verify.*pip install math-verify"
    ):
        manager.check_data_sources(["math"])
    with pytest.raises(
        ConfigError, match=r"reward\.combine\.math needs the Python package math-verify"
    ):
        RewardManager(RewardConfig(processes=0, combine={"math": 1.0}))


# ---- combinations


def test_a_combination_judges_every_row_and_records_each_score() -> None:
    config = RewardConfig(
        processes=0, combine={"gsm8k": 0.75, "format": 0.25}, kwargs={"flexible": True}
    )
    manager = RewardManager(config)
    manager.check_data_sources(["anything"])
    right = "<think>x</think><answer>it is 18</answer>"
    first, second = manager.score(["a", "b"], [right, "it is 18"], ["18", "18"])
    assert (first.score, second.score) == (1.0, 0.75)
    assert (
        first.extra == {"answer": "18", "gsm8k": 1.0, "format": 1.0}
        and second.extra["format"] == 0.0
    )


def test_a_combination_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"reward\.combine: .*unknown verifier; did you mean 'gsm8k'"
    ):
        RewardManager(RewardConfig(processes=0, combine={"gsm8": 1.0}))
    with pytest.raises(ConfigError, match=r"reward\.combine\.gsm8k='much': a verifier's weight"):
        RewardManager(RewardConfig(processes=0, combine={"gsm8k": "much"}))
    with pytest.raises(
        ConfigError,
        match=r"reward\.kwargs\.loud is not an option of any verifier \(their options: flexible",
    ):
        RewardManager(RewardConfig(processes=0, combine={"gsm8k": 1.0}, kwargs={"loud": True}))
    with pytest.raises(ConfigError, match=r"reward\.combine=.*with reward\.path=mine\.py"):
        RewardManager(RewardConfig(processes=0, path="mine.py", combine={"gsm8k": 1.0}))
