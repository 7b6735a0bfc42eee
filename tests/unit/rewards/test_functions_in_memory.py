"""A reward function that exists in this process alone, in the pool: forked, not imported."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.registry import offer
from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError
from hybridflow.process.children import state_of
from hybridflow.rewards import RewardManager

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path) -> Callable[..., RewardManager]:
    """A pool that scores with a function of this process."""

    def make(function: Callable[..., Any], **settings: Any) -> RewardManager:
        path = tmp_path / "given.py"
        path.write_text("raise ImportError('not here')\n")
        offer(path, given=function)
        config = RewardConfig(path=str(path), name="given", **{"processes": 2, **settings})
        return RewardManager(config, tmp_path / "rewards.log")

    return make


def scores(manager: RewardManager, *texts: str) -> list[Any]:
    """What the pool says of these texts."""
    return manager.score(["a"] * len(texts), texts, ["c"] * len(texts))


def test_a_closure_is_called_in_processes_of_the_pool(
    pool: Callable[..., RewardManager], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    seen = {"weight": 0.25}
    held = (tmp_path / "held").open("w")

    def function(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
    ) -> dict[str, Any]:
        print("scoring", solution_str)
        files = [os.readlink(f"/proc/self/fd/{one}") for one in range(3, 40) if _is_open(one)]
        return {
            "score": seen["weight"] * len(solution_str),
            "pid": os.getpid(),
            "token": os.environ.get("RAY_AUTH_TOKEN", ""),
            "held": held.name in files,
        }

    with held, pool(function) as manager:
        results = scores(manager, "x", "yy", "zzz", "wwww")
    assert [one.score for one in results] == [0.25, 0.5, 0.75, 1.0]
    extra = [one.extra for one in results]
    assert os.getpid() not in {one["pid"] for one in extra}
    assert {(one["token"], one["held"]) for one in extra} == {("", False)}
    assert "scoring yy" in (tmp_path / "rewards.log").read_text()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_pool_that_was_killed_is_forked_again(pool: Callable[..., RewardManager]) -> None:
    def function(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        return float(solution_str)

    with pool(function) as manager:
        assert [one.score for one in scores(manager, "1")] == [1.0]
        assert manager._pool is not None
        first = manager._pool._process.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while state_of(first) not in ("", "Z") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [one.score for one in scores(manager, "2", "3")] == [2.0, 3.0]
        assert manager._pool._process.pid != first
        last = manager._pool._process.pid
    assert state_of(last) == ""


def test_a_call_that_hangs_is_ended_and_an_error_has_its_line(
    pool: Callable[..., RewardManager],
) -> None:
    def function(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        if solution_str == "hang":
            time.sleep(3600)
        if solution_str == "raise":
            raise ValueError("no")
        return 1.0

    line = function.__code__.co_firstlineno + 4
    with pool(function, timeout_s=2.0) as manager:
        right, hung, raised = scores(manager, "right", "hang", "raise")
    assert right.score == 1.0 and right.failure is None
    assert "no score within 2 s" in str(hung.failure)
    assert f"ValueError: no (line {line})" in str(raised.failure)


def test_a_function_with_other_arguments_is_refused(pool: Callable[..., RewardManager]) -> None:
    with (
        pool(lambda completions: 1.0) as manager,
        pytest.raises(ConfigError, match="cannot be called with the keyword arguments data_source"),
    ):
        scores(manager, "x")
