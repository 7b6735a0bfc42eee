"""CURE: what the tester is asked, how its unit tests are rewarded, and what the check says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hybridflow.batch import DataProto, objects
from hybridflow.config.schema import AlgorithmConfig, PolicyConfig, RunConfig
from hybridflow.errors import ConfigError
from hybridflow.flows.cure import judged, requests
from hybridflow.rewards.unit_tests import ProgramRuns, UnitTest
from hybridflow.trainer.flow_check import check_flow
from tests.unit.trainer.worlds import config_of


class Runs:
    """A program "+3" adds 3 to what a unit test gives."""

    async def passed(
        self, responses: Sequence[str], tests: Sequence[UnitTest | None]
    ) -> np.ndarray:
        """`ProgramRuns.passed`."""
        return np.array(
            [
                [
                    test is not None and int(test.given) + int(program) == int(test.wanted)
                    for test in tests
                ]
                for program in responses
            ]
        )


def rows(uid: Sequence[int], **columns: Sequence[Any]) -> DataProto:
    found = {name: objects(list(values)) for name, values in columns.items()}
    return DataProto.from_columns({"uid": np.array(uid, np.int64), **found})


def unit_test(given: int, wanted: int) -> str:
    return f"```\n{given}\n```\n```\n{wanted}\n```"


def test_unit_tests_are_judged_by_the_programs_of_their_task() -> None:
    programs = rows([4, 4, 4, 7, 7, 7, 9, 9, 9], response_text=["+3", "+3", "+5"] * 3)
    scores = np.array([1, 1, 0, 0, 0, 0.5, 1, 1, 1], np.float32)
    programs = programs.with_columns(scores=scores)
    texts = [unit_test(1, 4), unit_test(1, 6), "no test"]
    tests = rows([0, 0, 0, 1, 1, 1, 2, 2, 2], response_text=texts * 3)
    rewards, metrics = asyncio.run(judged(programs, tests, cast(ProgramRuns, Runs())))
    # of the second task no program is right, and of the third one none is wrong
    assert rewards.tolist() == [1, -1, -1, 0, 0, 0, 0, 0, 0]
    # in the third task "+5" counts as right, and the programs agree on no unit test
    assert metrics["right_tests"] == pytest.approx((1 / 3 + 0) / 2)
    assert metrics["judged_tasks"] == pytest.approx(1 / 3)
    assert metrics["mu"] == pytest.approx((1 - 1 + 0) / 3)


def test_the_tester_is_asked_once_for_each_task_in_the_order_of_the_batch() -> None:
    messages = [
        [{"role": "system", "content": "You code."}, {"role": "user", "content": text}]
        for text in ("plus {task}", "plus {task}", "minus 2")
    ]
    programs = rows([0, 0, 1], prompt=messages)
    assert requests(programs, "{task}: a test of {task}, {}") == [
        "plus {task}: a test of plus {task}, {}",
        "minus 2: a test of minus 2, {}",
    ]


def curing(folder: Path, keep_prompts: bool) -> RunConfig:
    config = config_of(folder)
    return replace(
        config,
        algorithm=AlgorithmConfig(flow="cure"),
        data=replace(config.data, keep_prompts=keep_prompts),
        roles={"tester": PolicyConfig(config.model, config.actor, config.rollout)},
    )


def test_the_flow_passes_the_check_of_flows(tmp_path: Path) -> None:
    said = list[str]()
    check_flow(curing(tmp_path / "run", True), said.append)
    assert said == []


def test_without_the_prompts_the_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no column 'prompt'.*data.keep_prompts=true"):
        check_flow(curing(tmp_path / "run", False), print)
