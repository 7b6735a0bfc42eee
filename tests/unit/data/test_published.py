"""Published data sets, in small files of their forms: each row becomes a prompt that its verifier
can judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from hybridflow.data.prepare.published import calls_of
from hybridflow.errors import ConfigError, DataError
from hybridflow.rewards.verifiers.base import by_data_source
from tests.hub_cache import download, hub_cache
from tests.unit.config.small import found
from tests.unit.data.published_files import CODE, FILES, HALF, TARGET, fill

# the files written (of one row each), a ground truth, an answer that is right; None: it is not
# compared here
MADE: dict[str, tuple[tuple[str, ...], Any, str | None]] = {
    "dapo_math": (("train",), "2", "Answer: 2"),
    "math": (("train", "test"), HALF, r"\boxed{0.5}"),
    "math500": (("test",), HALF, r"\boxed{1/2}"),
    "aime24": (("test",), "033", r"\boxed{33}"),
    "aime25": (("test",), "70", r"\boxed{70}"),
    "deepscaler": (("train",), "5", r"\boxed{5}"),
    "search_r1": (("train", "test"), TARGET, "<answer>Paris</answer>"),
    "gsm8k": (("train", "test"), "1000", "#### 1000"),
    "eurus2_code": (("train", "test"), CODE, None),
    "mbpp": (("train", "test"), None, None),
    "humaneval": (("test",), None, None),
}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with hub_cache(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("task", MADE)
def test_a_published_form_becomes_prompts_that_a_verifier_judges(tmp_path: Path, task: str) -> None:
    splits, truth, answer = MADE[task]
    done = prepare(task, tmp_path / "out", fill(tmp_path / "raw", FILES[task]))
    assert done.rows == {f"{split}.parquet": 1 for split in splits}
    row = pq.read_table(done.folder / f"{splits[0]}.parquet").to_pylist()[0]
    assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"]
    verifier = by_data_source()  # patterns as well as names
    names = [
        name
        for name in verifier
        if name == row["data_source"] or row["data_source"].startswith(name.rstrip("*"))
    ]
    assert names, row["data_source"]
    assert truth is None or row["reward_model"]["ground_truth"] == truth
    if answer is not None:
        result = verifier[names[0]].function(answer, row["reward_model"]["ground_truth"])
        assert getattr(result, "score", result) == 1.0
    assert (done.folder / "tokenizer").is_dir() == (task == "gsm8k")


def test_tests_of_programs_are_read_as_calls_and_never_run() -> None:
    tests = "assert f(1, 'a', [2]) == {'b': 3}\nassert f(2) == None"
    assert calls_of(tests, ()) == ("f", [[1, "a", [2]], [2]], [{"b": 3}, None])
    assert calls_of("assert f(1) == 1\nassert g(1) == 1", ()) is None
    others = (
        "f(1) == (1, 2)",
        "f(set()) == 1",
        "abs(f(1) - 2) < 1",
        "f(open('x')) == 1",
        "f(x=1) == 1",
        "f(1)",
        "(",
    )
    assert [calls_of(f"assert {other}", ()) for other in others] == [None] * len(others)


def test_a_set_comes_from_the_cache_with_the_evaluation_sets_beside_it(
    cache: Path, tmp_path: Path
) -> None:
    options = {"evaluate": ["aime24", "math500"]}
    repositories = {"dapo_math": "BytedTsinghua-SIA/DAPO-Math-17k", "aime24": "math-ai/aime24"}
    repositories["math500"] = "HuggingFaceH4/MATH-500"
    with pytest.raises(DataError) as error:
        prepare("dapo_math", tmp_path / "out", None, options)
    lines = str(error.value).splitlines()
    for line, name in zip(lines, repositories.values(), strict=True):
        assert f"`hf download --repo-type dataset {name}`" in line
    for task, repository in repositories.items():
        snapshot = download(cache, repository, dict.fromkeys(FILES[task], ""), "datasets")
        fill(snapshot, FILES[task])
    done = prepare("dapo_math", tmp_path / "out", None, options)
    assert done.rows == {"train.parquet": 1, "aime24.parquet": 1, "math500.parquet": 1}
    for folder in cache.iterdir():
        folder.rename(tmp_path / folder.name)  # a node that has the prepared data alone
    assert prepare("dapo_math", tmp_path / "out", None, options).reused
    with pytest.raises(DataError):
        prepare("dapo_math", tmp_path / "out", None, {"evaluate": ["aime24"]})


def test_an_evaluation_set_must_be_published_and_held_out(tmp_path: Path) -> None:
    for name in ("arithmetic", "dapo_math"):
        with pytest.raises(ConfigError, match=rf"evaluate: {name} is not a task"):
            prepare("math", tmp_path / "out", tmp_path, {"evaluate": [name]})


def test_a_row_that_lacks_its_answer_is_named(tmp_path: Path) -> None:
    source = fill(
        tmp_path / "raw",
        {"test.jsonl": [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": " "}]},
    )
    with pytest.raises(DataError, match=r"test\.jsonl, row 1, column 'answer': expected an answer"):
        prepare("math500", tmp_path / "out", source)
    fill(tmp_path / "raw", {"test.jsonl": [{"question": "p"}]})
    with pytest.raises(DataError, match=r"column 'problem', 'answer' is missing; it has question"):
        prepare("math500", tmp_path / "out", source)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "math500", "dapo-math"])
def test_a_group_of_data_is_one_key(cache: Path, name: str) -> None:
    config = load_config("grpo-qwen3-8b-1x8", [f"data={name}"])
    assert config.data.prepare.task and config.data.train_files
    lines = found(f"data={name}", name="grpo-qwen3-8b-1x8")
    assert any(
        "hf download --repo-type dataset" in line and "hybridflow prepare" in line for line in lines
    )
