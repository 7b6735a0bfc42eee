"""What a call of a reward may do, is told and leaves behind, and which ground truths are refused
before a run."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.config.schema import DataConfig, RewardConfig, RunConfig
from hybridflow.data.dataset import PromptDataset
from hybridflow.errors import DataError
from hybridflow.rewards import RewardManager
from hybridflow.rewards.verifiers.base import VERIFIERS
from hybridflow.rollout.evaluation import Scorer, check_truths
from hybridflow.single_controller import block_on

ROW = "data_source, solution_str, ground_truth, extra_info"


def manager_of(folder: Path, code: str, **settings: Any) -> RewardManager:
    (folder / "reward.py").write_text(textwrap.dedent(code))
    return RewardManager(
        RewardConfig(path=str(folder / "reward.py"), **settings), folder / "rewards.log"
    )


@pytest.mark.parametrize("processes", [0, 1])
def test_a_function_may_run_an_event_loop_of_its_own(tmp_path: Path, processes: int) -> None:
    code = f"""
        import asyncio

        async def later(text):
            await asyncio.sleep(0)
            return float(text)

        def compute_score({ROW}):
            if solution_str == "1":
                return asyncio.run(later(solution_str))
            return asyncio.new_event_loop().run_until_complete(later(solution_str))
    """
    with manager_of(tmp_path, code, processes=processes) as manager:
        assert [found.score for found in manager.score(["a"] * 2, ["1", "2"], ["c"] * 2)] == [
            1.0,
            2.0,
        ]


def test_an_alarm_that_a_call_leaves_ends_no_other_call(tmp_path: Path) -> None:
    code = f"""
        import signal, time

        def compute_score({ROW}):
            if solution_str == "arm":
                signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)
            else:
                end = time.process_time() + 0.2
                while time.process_time() < end:
                    pass
            return 1.0
    """
    with manager_of(tmp_path, code, processes=1) as manager:
        found = manager.score(["a"] * 4, ["arm", "work", "arm", "work"], ["c"] * 4)
    assert [(result.score, result.failure) for result in found] == [(1.0, None)] * 4


@pytest.mark.parametrize("processes", [0, 1])
def test_a_value_named_failure_is_none(tmp_path: Path, processes: int) -> None:
    code = f"def compute_score({ROW}): return {{'score': 1, 'failure': 'wrong digits'}}"
    with manager_of(tmp_path, code, processes=processes) as manager:
        found = manager.score(["a"], ["b"], ["c"])[0]
    assert (found.score, found.failure, found.extra) == (1.0, None, {"failure": "wrong digits"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", ["10**400", "{'score': 1, 'a': 10**5000}", "float('1e39')", "lambda: 1"]
)
def test_a_value_that_cannot_be_used_costs_its_row_alone(tmp_path: Path, value: str) -> None:
    code = f"def compute_score({ROW}): return ({value}) if solution_str == 'bad' else 1"
    with manager_of(tmp_path, code, processes=1) as manager:
        found = manager.score(["a"] * 3, ["ok", "bad", "ok"], ["c"] * 3)
    assert [result.failure is None for result in found] == [True, False, True]


# ---- budgets


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9}}",
        "x+9^{9^{9}}",
        "(10^{5})!",
        "\\frac{1}{" * 200 + "x" + "}" * 200,
        "(" * 2000 + "x" + ")" * 2000,
    ],
)
def test_a_comparison_has_a_budget(answer: str) -> None:
    """Without one each would take the deadline of the call, a minute, or all memory."""
    for truth in ("7", "x"):
        assert (
            VERIFIERS.get("math").function(f"\\boxed{{{answer}}}", truth, comparison_s=0.5).score
            == 0
        )


@pytest.mark.slow
def test_a_program_keeps_what_it_has_passed_when_time_is_over() -> None:
    program = "```python\nimport time\nn = int(input())\nif n > 2: time.sleep(9)\nprint(n)\n```"
    truth = {"inputs": [str(n) for n in range(8)], "outputs": [str(n) for n in range(8)]}
    code = VERIFIERS.get("code").function
    slow = code(program, truth, test_timeout_s=0.5)
    assert slow.score == 3 / 8 and slow.extra["failed_with"] == "timeout"
    began = time.monotonic()
    late = code(program, truth, test_timeout_s=30.0, timeout_s=2.0)
    assert late.score == 3 / 8 and late.failure is None and time.monotonic() - began < 9


@pytest.mark.slow
def test_a_program_that_loops_is_wrong_and_no_failure() -> None:
    config = RewardConfig(
        processes=1, timeout_s=3.0, kwargs={"test_timeout_s": 2.0}, on_failure="drop"
    )
    truth = {"inputs": ["1"] * 3, "outputs": ["1"] * 3}
    with RewardManager(config) as manager:
        found = manager.score(
            ["apps"] * 2,
            ["```python\nwhile True: pass\n```", "```python\nprint(1)\n```"],
            [truth] * 2,
        )
    assert [(result.score, result.failure) for result in found] == [(0.0, None), (1.0, None)]


@pytest.mark.slow
def test_a_text_that_is_too_long_for_the_driver_goes_to_the_pool() -> None:
    with RewardManager(RewardConfig(processes=1)) as manager:
        parts = manager.submit(["arithmetic"] * 2, ["4", "4" + " " * 200_000], ["4"] * 2)
        assert [isinstance(call, int) for call, _ in parts.calls] == [False, True]
        assert [result.score for result in block_on(manager.collect([parts]))[0]] == [1.0, 1.0]


# ---- the prompt's thinking


class Letters:
    """A tokenizer of characters."""

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    decode_response = decode


def batch_of(prompts: list[str], responses: list[str], source: str, truth: Any = "7") -> DataProto:
    rows = len(prompts)
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows([[*map(ord, text)] for text in prompts], np.int64),
            "response_ids": Jagged.from_rows([[*map(ord, text)] for text in responses], np.int64),
            "data_source": objects([source] * rows),
            "ground_truth": objects([truth] * rows),
            "extra_info": objects([None] * rows),
        }
    )


def test_a_verifier_knows_whether_the_prompt_opened_the_thinking() -> None:
    prompts = [
        "<|assistant|>",
        "<|assistant|><think>\n",
        "<|assistant|><think>\n",
        "<think>\n\n</think>\n\n",
    ]
    responses = ["#### 7", "#### 7", "a</think>\n#### 7", "#### 7"]
    with RewardManager(RewardConfig(processes=0)) as manager:
        scorer = Scorer(manager, Letters())  # type: ignore[arg-type]
        assert block_on(scorer.score(batch_of(prompts, responses, "openai/gsm8k")))[
            "scores"
        ].tolist() == [1, 0, 1, 1]
        form = batch_of(prompts[:2], ["a</think>\n<answer>b</answer>"] * 2, "format")
        assert block_on(scorer.score(form))["scores"].tolist() == [0, 1]


def test_a_function_is_told_whether_the_prompt_opened_the_thinking(tmp_path: Path) -> None:
    code = f"def compute_score({ROW}): return extra_info['thinking_open']"
    with manager_of(tmp_path, code, processes=0) as manager:
        scorer = Scorer(manager, Letters())  # type: ignore[arg-type]
        assert block_on(scorer.score(batch_of(["a", "<think>"], ["b"] * 2, "any")))[
            "scores"
        ].tolist() == [0, 1]


# ---- ground truths


@pytest.mark.parametrize(
    ("source", "truths", "wrong"),
    [
        ("openai/gsm8k", ["7", "many", "8"], "'many' must be a number"),
        ("openai/gsm8k", [7, 8, 9], None),
        ("cais/mmlu", [0, 3, 26], "26 is neither a letter"),
        ("cais/mmlu", ["A", "(b)", "12"], "'12' is neither a letter"),
        ("math", ["\\frac12", "7", "x"], None),
        ("math", [0.5, 7.0, 8.0], None),
        ("regex", ["a", "(", "b"], "not a valid regular expression"),
        (
            "searchR1_nq",
            [{"target": ["a"]}, {"target": ["b"]}, {"target": []}],
            "must have the form {",
        ),
        ("apps", ["{}", "[]", ""], "contains no tests"),
    ],
)
def test_a_ground_truth_that_cannot_be_used_is_refused_with_its_row(
    source: str, truths: list[Any], wrong: str | None
) -> None:
    dataset: Any = Rows(source, truths)
    manager = RewardManager(RewardConfig(processes=0))
    if wrong is None:
        check_truths(manager, RunConfig(), dataset)
        return
    with pytest.raises(DataError) as error:
        check_truths(manager, RunConfig(), dataset)
    row = 1 if truths[1] in ("many", "(") else 2
    assert wrong in str(error.value) and f"train.parquet, row {row}, column 'reward_model'" in str(
        error.value
    )


@pytest.mark.slow
@pytest.mark.parametrize("combined", [False, True])
def test_a_ground_truth_that_a_users_verifier_cannot_use_is_refused_with_its_row(
    tmp_path: Path, combined: bool
) -> None:
    (tmp_path / "own.py").write_text(
        "from hybridflow.rewards.verifiers.base import verifier\n"
        "def whole(truth):\n"
        "    if not isinstance(truth, int): raise ValueError(f'{truth!r} is no whole number')\n"
        "@verifier('mine', data_sources=['mine'], truth=whole)\n"
        "def mine(response, ground_truth): return response == str(ground_truth)\n"
    )
    name = f"{tmp_path}/own.py:mine"
    config = RewardConfig(combine={name: 1.0}) if combined else RewardConfig(verifiers=(name,))
    with RewardManager(config) as manager:
        check_truths(manager, RunConfig(), cast(Any, Rows("mine", list(range(5000)))))
        wrong: Any = Rows("mine", [*range(4500), "4", *range(9)])
        with pytest.raises(
            DataError,
            match=r"train.parquet, row 4500, column 'reward_model': '4' is no whole number",
        ):
            check_truths(manager, RunConfig(), wrong)


class Rows:
    """A dataset in memory."""

    def __init__(self, source: str, truths: list[Any]) -> None:
        self.data_sources = [source]
        self.truths = truths
        self.places = [f"train.parquet, row {row}" for row in range(len(truths))]

    def __len__(self) -> int:
        return len(self.truths)

    def batch(self, indices: Any) -> DataProto:
        sources = objects(self.data_sources * len(self.truths))
        return DataProto.from_columns(
            {"data_source": sources, "ground_truth": objects(self.truths)}
        )


def test_a_dataset_names_the_place_of_each_row(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "a",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": "1"},
        }
        for text in ("x", "y" * 500, "z")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    tokenizer = CharacterTokenizer()
    config = DataConfig(max_prompt_length=100, filter_overlong_prompts=True)
    dataset = PromptDataset([tmp_path / "train.parquet"], tokenizer, config)  # type: ignore[arg-type]
    assert dataset.places == [
        f"{tmp_path}/train.parquet, row 0",
        f"{tmp_path}/train.parquet, row 2",
    ]


class CharacterTokenizer:
    """Renders messages as their text."""

    eos_id = 0

    def identity(self) -> None:
        """Return nothing: its tokens are not cached."""

    def __getattr__(self, name: str) -> Any:
        return lambda messages, *args, **kwargs: [
            ord(sign) for message in messages for sign in message["content"]
        ]
