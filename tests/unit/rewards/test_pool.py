"""The pool of processes that score responses: deadlines, lost processes, policies for rows without
a score."""

import os
import textwrap
import time
from pathlib import Path

import pytest

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.process.children import state_of
from hybridflow.rewards import RewardManager
from hybridflow.rewards.manager import Submitted
from hybridflow.rewards.verifiers.base import ScoreResult
from hybridflow.single_controller import block_on

ROW = "data_source, solution_str, ground_truth, extra_info"


def _manager(folder: Path, code: str, **settings: object) -> RewardManager:
    (folder / "reward.py").write_text(textwrap.dedent(code))
    given = {"path": str(folder / "reward.py"), "processes": 2} | settings
    return RewardManager(RewardConfig(**given), folder / "logs" / "rewards.log")  # type: ignore[arg-type]


def _ends(pid: int) -> bool:
    """Whether the process has ended within a minute. Who has reaped it, if anybody, does not
    matter."""
    deadline = time.monotonic() + 60
    while state_of(pid) not in ("", "Z", "X"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _collected(manager: RewardManager, part: Submitted) -> list[ScoreResult]:
    return block_on(manager.collect([part]))[0]


def _score(manager: RewardManager, *texts: str, **columns: object) -> list:
    return manager.score(["a"] * len(texts), texts, ["c"] * len(texts), **columns)  # type: ignore[arg-type]


@pytest.mark.slow
def test_rows_that_hang_raise_end_or_return_nonsense_cost_themselves_alone(tmp_path):
    code = f"""
        import os, signal, subprocess, time

        def compute_score({ROW}):
            print("scoring", solution_str)
            if solution_str == "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                child = subprocess.Popen(["sleep", "3600"])
                open(os.path.join(extra_info["folder"], "child"), "w").write(str(child.pid))
                time.sleep(3600)
            if solution_str == "raise":
                raise KeyError("k")
            if solution_str == "end":
                os._exit(3)
            if solution_str == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if solution_str == "object":
                return {{"score": 1.0, "what": object()}}
            return None if solution_str == "nonsense" else {{"score": 1.0, "pid": os.getpid()}}
    """
    texts = ["hang", "ok", "raise", "end", "kill", "object", "nonsense", "ok", "ok"]
    with _manager(tmp_path, code, timeout_s=8.0) as manager:
        results = _score(manager, *texts, extra_info=[{"folder": str(tmp_path)}] * len(texts))
        assert [result.score for result in results] == [float(text == "ok") for text in texts]
        said = [result.failure for result in results if result.failure]
        assert said[0] == "no score within 8 s (reward.timeout_s)"
        assert "raised KeyError: 'k' (line 12)" in said[1]
        assert said[2:4] == [
            f"the process scoring it exited ({how})" for how in ("exit code 3", "signal 9")
        ]
        assert "not plain data: a value of type object" in said[4] and "returned 'None'" in said[5]
        pids = {result.extra["pid"] for result in results if not result.failure}
        assert os.getpid() not in pids
        assert [result.score for result in _score(manager, "ok", "ok")] == [1.0, 1.0], (
            "lost processes are replaced"
        )
    assert _ends(int((tmp_path / "child").read_text())), "what a function started is killed with it"
    assert "scoring hang" in (tmp_path / "logs" / "rewards.log").read_text()


MEETING = f"""
    import os, pathlib, time

    def compute_score({ROW}):
        folder = pathlib.Path(extra_info["folder"])
        while solution_str == "wait" and not (folder / "all-are-submitted").exists():
            time.sleep(0.01)
        if solution_str.startswith("meet"):
            (folder / f"{{solution_str}}-{{os.getpid()}}").touch()
            while len(list(folder.glob(f"{{solution_str}}-*"))) < 2:
                time.sleep(0.01)
        return {{"score": 1.0, "pid": os.getpid()}}
"""


def _scored_by(
    manager: RewardManager, folder: Path, texts: list[str], truths: list[str]
) -> list[tuple[str, int]]:
    """Each row's ground truth and the process that has scored it."""
    submitted = manager.submit(
        ["a"] * len(texts), texts, truths, [{"folder": str(folder)}] * len(texts)
    )
    (folder / "all-are-submitted").touch()
    results = _collected(manager, submitted)
    return [(truth, result.extra["pid"]) for truth, result in zip(truths, results, strict=True)]


@pytest.mark.slow
def test_rows_with_one_ground_truth_go_to_one_process_while_others_have_work(tmp_path):
    # the processes work in step
    texts = ["wait"] * 2 + [f"meet {number}" for number in range(4)] * 2
    with _manager(tmp_path, MEETING, timeout_s=30.0) as manager:
        scored_by = _scored_by(manager, tmp_path, texts, ["1", "2"] + ["x"] * 4 + ["y"] * 4)[2:]
    assert len(set(scored_by)) == 2 and len({pid for _, pid in scored_by}) == 2, scored_by


@pytest.mark.slow
def test_no_process_is_idle_for_the_sake_of_a_ground_truth(tmp_path):
    with _manager(tmp_path, MEETING, timeout_s=30.0) as manager:
        scored_by = _scored_by(manager, tmp_path, ["meet 0"] * 2, ["x"] * 2)
    assert len(set(scored_by)) == 2, scored_by


def test_rows_that_nobody_collects_cost_nobody_anything(tmp_path):
    code = f"""
        def compute_score({ROW}):
            return float(solution_str)
    """
    with _manager(tmp_path, code) as manager:
        first, dropped, last = (
            manager.submit(["a"] * 2, [text, "0.5"], ["c"] * 2) for text in ("1", "2", "3")
        )
        manager.forget(dropped)
        assert [result.score for result in _collected(manager, last)] == [3.0, 0.5]
        assert [result.score for result in _collected(manager, first)] == [1.0, 0.5]
        manager.forget(manager.submit(["a"], ["4"], ["c"]))
        assert [result.score for result in _score(manager, "5")] == [5.0]
        assert manager._pool is not None and not manager._pool._outcomes and not manager._pool._jobs


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_functions_print_is_in_the_log_in_whole_lines(tmp_path, monkeypatch, unbuffered):
    """Also what a process printed before it was killed, and whether or not Python writes each part
    of a line apart."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    code = f"""
        import os, signal

        def compute_score({ROW}):
            for at in range(500):
                print(solution_str, "line", at)
            if solution_str == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return 1.0
    """
    with _manager(tmp_path, code) as manager:
        _score(manager, "ok", "killed", "ok")
    lines = (tmp_path / "logs" / "rewards.log").read_text().splitlines()
    expected = [f"{text} line {at}" for text in ("ok", "killed", "ok") for at in range(500)]
    assert sorted(lines) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero", "drop", "stop"])
def test_a_reward_that_fails_everywhere_stops_the_run_whatever_the_policy(tmp_path, policy):
    code = f"def compute_score({ROW}): return 1 / int(solution_str)"
    with _manager(tmp_path, code, on_failure=policy) as manager:
        with pytest.raises(DataError, match=r"row 0: .*ZeroDivisionError.*\(2 of 2 rows failed\)"):
            _score(manager, "0", "0")
        if policy == "stop":
            with pytest.raises(
                DataError, match=r"row 1: .*ZeroDivisionError.*\(1 of 2 rows failed\)"
            ):
                _score(manager, "1", "0")
        else:
            assert [bool(result.failure) for result in _score(manager, "1", "0")] == [False, True]


@pytest.mark.slow
def test_async_calls_run_together_and_each_has_its_deadline(tmp_path):
    code = f"""
        import asyncio
        arrived = 0

        async def compute_score({ROW}):
            global arrived
            arrived += 1
            while arrived < 40:  # would never end one after another
                await asyncio.sleep(0.01)
            return float(solution_str)
    """
    with _manager(tmp_path, code, processes=1) as manager:
        assert [result.score for result in _score(manager, *map(str, range(40)))] == list(range(40))


@pytest.mark.full
def test_an_async_call_that_waits_or_blocks_the_loop_costs_itself_alone(tmp_path):
    code = f"""
        import asyncio, time

        async def compute_score({ROW}):
            if solution_str == "wait":
                await asyncio.sleep(3600)
            if solution_str == "block":
                time.sleep(3600)
            return 1.0
    """
    with _manager(tmp_path, code, processes=1, timeout_s=8.0) as manager:
        results = _score(manager, "wait", "ok") + _score(manager, "ok", "block")
    late = "no score within 8 s (reward.timeout_s)"
    assert [result.failure for result in results] == [late, None, None, late]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_of_groups_gets_the_samples_of_a_prompt_at_once(tmp_path, kind):
    code = f"""
        {kind} compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale):
            if "short" in solution_strs:
                return [1.0]
            best = max(solution_strs, key=len)
            return [{{"score": scale * (text == best), "rivals": len(solution_strs)}} for text in solution_strs]
    """
    with _manager(tmp_path, code, kwargs={"scale": 2.0}) as manager:
        results = _score(manager, "a", "b", "ccc", "bb", "short", "x", groups=[0, 1, 0, 1, 2, 2])
    assert [result.score for result in results] == [0.0, 0.0, 2.0, 2.0, 0.0, 0.0]
    assert [result.extra.get("rivals") for result in results] == [2, 2, 2, 2, None, None]
    assert "expected a list of 2 scores" in str(results[4].failure)


def test_rows_are_scored_while_the_caller_does_something_else(tmp_path):
    code = f"""
        import pathlib

        def compute_score({ROW}):
            pathlib.Path(extra_info["folder"], solution_str).touch()
            return float(solution_str)
    """
    with _manager(tmp_path, code) as manager:
        submitted = [
            manager.submit(["a"], [text], ["c"], [{"folder": str(tmp_path)}])
            for text in ("1", "2", "3")
        ]
        deadline = time.monotonic() + 120
        # before anybody has asked for scores
        while not all((tmp_path / text).exists() for text in ("1", "2", "3")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [_collected(manager, part)[0].score for part in reversed(submitted)] == [
            3.0,
            2.0,
            1.0,
        ]


@pytest.mark.slow
def test_a_host_that_is_killed_is_started_again_and_no_row_is_lost(tmp_path):
    code = f"""
        import os, signal

        def compute_score({ROW}):
            if solution_str == "host" and not os.path.exists(extra_info["flag"]):
                open(extra_info["flag"], "w").close()
                os.kill(os.getppid(), signal.SIGKILL)
            return 1.0
    """
    with _manager(tmp_path, code) as manager:
        infos = [{"flag": str(tmp_path / "flag")}] * 4
        assert [
            result.score for result in _score(manager, "a", "host", "b", "c", extra_info=infos)
        ] == [1.0] * 4


@pytest.mark.slow
def test_credentials_of_the_job_do_not_reach_rewards_and_values_keep_their_types(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HYBRIDFLOW_JOB_SECRET", "s" * 64)
    monkeypatch.setenv("MY_JUDGE_KEY", "k")
    code = f"""
        import os

        def compute_score({ROW}):
            names = [name for name in ("HYBRIDFLOW_JOB_SECRET", "MY_JUDGE_KEY") if name in os.environ]
            types = [type(value).__name__ for value in extra_info.values()]
            return {{"score": 1.0, "names": names, "types": types}}
    """
    import datetime

    info = {
        "image": b"\xff",
        "on": datetime.date(2026, 1, 2),
        "at": datetime.datetime(2026, 1, 2),
        "n": 1,
    }
    with _manager(tmp_path, code) as manager:
        result = manager.score(["a"], ["b"], ["c"], [info])[0]
        assert result.extra == {
            "names": ["MY_JUDGE_KEY"],
            "types": ["bytes", "date", "datetime", "int"],
        }
        with pytest.raises(
            DataError, match="a value of type complex; rewards accept only plain data"
        ):
            manager.score(["a"], ["b"], ["c"], [{"k": 1j}])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error", "named"),
    [
        (
            "import no_such_module_here",
            ConfigError,
            r"reward.py \(reward.path\) could not be imported: ModuleNotFound",
        ),
        (
            "import os; os._exit(4)",
            ConfigError,
            r"reward.py \(reward.path\) exited with code 4; see .*rewards.log",
        ),
        ("def compute_score(text): pass", ConfigError, "cannot be called with"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_the_first_rollout(tmp_path, code, error, named):
    with _manager(tmp_path, code) as manager, pytest.raises(error, match=named):
        manager.check_data_sources(["a"])


@pytest.mark.slow
def test_the_pool_ends_with_its_driver(tmp_path):
    with _manager(tmp_path, f"import os\ndef compute_score({ROW}): return os.getpid()") as manager:
        pid = int(_score(manager, "a")[0].score)
    assert _ends(pid)
