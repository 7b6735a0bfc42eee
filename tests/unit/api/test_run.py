"""A run's objects before anything starts: files of rows and functions, and the messages of the
command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hybridflow as hf
from hybridflow.cli.main import main
from hybridflow.config.registry import import_file
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError, FlowError, ResourceError
from hybridflow.rewards.verifiers.base import VERIFIERS

ROWS = [
    {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": f"{a}+{a}="}],
        "reward_model": {"ground_truth": str(2 * a)},
    }
    for a in range(8)
]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., hf.Run]:
    """A run in one process, in a folder of its own."""

    def make(*words: str, **given: Any) -> hf.Run:
        settings = {"recipe": "e2e", "cluster": "in-process", "output_dir": tmp_path / "runs"}
        return hf.Run(*words, **{**settings, **given})

    return make


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """A reward."""
    return float(ground_truth in solution_str)


@pytest.mark.slow
def test_what_is_not_installed_is_named_where_the_run_begins(
    made: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made()
    monkeypatch.setitem(sys.modules, "transformers", None)
    for _ in range(2):
        with pytest.raises(
            ResourceError, match=r"hybridflow.Run needs transformers, .*pip install"
        ):
            run.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", ["trainer.total_step=5", "actor.optim.lr=fast", "algorithm=groups"]
)
def test_a_wrong_setting_has_the_message_of_the_command_line(
    word: str, made: Callable[..., hf.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        made(word)
    assert main(["train", "--config-name", "e2e", word]) == 2
    assert capsys.readouterr().err.strip() == f"hybridflow: {error.value}"


def test_a_wrong_keyword_is_refused_with_the_nearest(made: Callable[..., hf.Run]) -> None:
    with pytest.raises(ConfigError, match=r"rewards.*; did you mean .?reward"):
        made(rewards=score)


def test_settings_win_in_their_order_and_sections_may_hold_objects(
    made: Callable[..., hf.Run],
) -> None:
    run = made(
        "seed=3",
        "trainer.total_steps=2",
        trainer={"total_steps": 7},
        data={"train": ROWS, "train_batch_size": 2},
        reward={"processes": 1},
    )
    config = run.config
    assert (config.seed, config.trainer.total_steps, config.reward.processes) == (3, 7, 1)
    assert config.data.train_batch_size == 2 and config.data.val_files == ()


@pytest.mark.slow
def test_a_recipe_may_be_a_file_with_groups_beside_it(
    tmp_path: Path, made: Callable[..., hf.Run]
) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "nine.yaml").write_text("total_steps: 9\n")
    (tmp_path / "mine.yaml").write_text("defaults: [e2e, trainer: nine, _self_]\nname: mine\n")
    text = "defaults:\n  - e2e\n  - override trainer: nine\n  - _self_\nname: mine\n"
    (tmp_path / "mine.yaml").write_text(text)
    run = made(recipe=tmp_path / "mine.yaml")
    assert (run.config.name, run.config.trainer.total_steps) == ("mine", 9)


@pytest.mark.slow
def test_rows_are_written_once_under_their_content(made: Callable[..., hf.Run]) -> None:
    run = made(data={"train": ROWS, "test": ROWS[:2]})
    [train], [test] = run.config.data.train_files, run.config.data.val_files
    assert pq.read_table(train).to_pylist() == ROWS and pq.read_table(test).num_rows == 2
    before = Path(train).stat().st_ino
    again = made(data=list(ROWS))
    assert again.config.data.train_files == (train,) and Path(train).stat().st_ino == before
    assert made(data=ROWS[1:]).config.data.train_files != (train,)
    assert not run.folder.exists() and not [*Path(train).parent.glob(".*")]


def test_a_table_writes_itself(made: Callable[..., hf.Run]) -> None:
    table = SimpleNamespace(
        to_parquet=lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path)
    )
    [file] = made(data=table).config.data.train_files
    assert pq.read_table(file).to_pylist() == ROWS


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([*ROWS, {"prompt": 5}], "data.train_files.*column 'prompt'"),
        ([], "data.train_files must contain at least one row"),
        ([1], "data.train_files, row 0: expected a dictionary, found 1"),
        (5, "data.train_files must be a path, .* got int"),
        ({"test": ROWS}, "data must contain train, .* got 'test'"),
        (
            {"train": ROWS, "test": ROWS, "val": ROWS},
            r"held-out prompts\); got 'train', 'test', 'val'",
        ),
        ("missing.parquet", "data.train_files: missing.parquet does not exist"),
        ([Path("a.parquet"), "b.parquet"], "data.train_files: a.parquet does not exist"),
    ],
)
def test_rows_that_make_no_file_are_refused(
    data: Any, said: str, made: Callable[..., hf.Run]
) -> None:
    with pytest.raises(ConfigError, match=said):
        made(data=data)


def test_a_model_replaces_the_recipes(tmp_path: Path, made: Callable[..., hf.Run]) -> None:
    with pytest.raises(ConfigError) as error:
        made(model=tmp_path / "absent", data=ROWS)
    assert f"model.path={tmp_path / 'absent'}" in str(error.value)
    assert "hf_config" not in str(error.value) and "model.tokenizer" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "lambda", "closure", "object"])
def test_a_function_is_found_here_and_nowhere_else(kind: str, made: Callable[..., hf.Run]) -> None:
    bonus = [1.0]

    class Scored:
        def __call__(
            self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
        ) -> float:
            return bonus[0]

    rewards: dict[str, Any] = {
        "function": score,
        "lambda": lambda data_source, solution_str, ground_truth, extra_info: 0.5,
        "closure": lambda data_source, solution_str, ground_truth, extra_info: bonus[0],
        "object": Scored(),
    }
    config = made(reward=rewards[kind]).config.reward
    path = Path(str(config.path))
    assert getattr(import_file(path, "reward.path"), config.name) is rewards[kind]
    code = (
        "import sys, pathlib; from hybridflow.config.registry import import_file\n"
        f"import_file(pathlib.Path({str(path)!r}), 'reward.path')"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "ImportError: this reward function was passed as an object" in there.stderr
    assert f"exists only in that program: {__file__}" in path.read_text()


def test_each_run_has_its_own_function(made: Callable[..., hf.Run]) -> None:
    """Closures of one source have one file; the run that starts is found under it."""

    def reward(value: float) -> Callable[..., float]:
        return lambda data_source, solution_str, ground_truth, extra_info: value

    one, two = made(reward=reward(1.0)), made(reward=reward(2.0))
    assert one.config.reward.path == two.config.reward.path
    for run, value in ((one, 1.0), (two, 2.0), (one, 1.0)):
        run._given.offer(run._folder_given)
        module = import_file(Path(str(run.config.reward.path)), "reward.path")
        assert module.given(None, None, None, None) == value


def test_an_edited_file_is_executed_anew_by_the_next_run(
    tmp_path: Path, made: Callable[..., hf.Run]
) -> None:
    file = tmp_path / "mine.py"
    register = "from hybridflow.rewards.verifiers.base import verifier\n"
    register += "@verifier('own', data_sources=['own'])\n"
    for value in (1, 22, 333):
        file.write_text(f"{register}def own(response, ground_truth): return {value}\n")
        made(reward=f"{file}:own")
        assert import_file(file, "reward.path").own(None, None) == value
        assert VERIFIERS.get(f"{file}:own").function(None, None) == value
    file.unlink()
    made()
    with pytest.raises(ConfigError, match="not found"):
        import_file(file, "reward.path")


def test_a_reward_may_be_a_file(tmp_path: Path, made: Callable[..., hf.Run]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def own(data_source, solution_str, ground_truth, extra_info): return 1.0\n")
    named = made(reward=f"{file}:own").config.reward
    assert (named.path, named.name) == (str(file), "own")
    assert made(reward=file).config.reward.name == "compute_score"


def test_a_flow_is_an_object(made: Callable[..., hf.Run]) -> None:
    async def plain(run: Any) -> None:
        """No flow yet."""

    with pytest.raises(ConfigError, match=r"flow=plain is not a flow; decorate"):
        made(flow=plain)
    decorated = hf.flow("tried", roles=("policy", "reference"))(plain)
    name = str(made(flow=decorated).config.algorithm.flow)
    assert name.endswith(".py:plain") and Path(name.rpartition(":")[0]).is_file()
    assert made(flow="grpo").config.algorithm.flow == "grpo"


def test_what_a_run_cannot_do_before_it_starts(made: Callable[..., hf.Run]) -> None:
    run = made()
    assert isinstance(run.config, RunConfig)
    assert (run.step, run.metrics, run.summary) == (0, {}, None)
    for call in (run.samples, run.sync, lambda: run.policy.update(None)):
        with pytest.raises(FlowError, match=r"steps_by_hand"):
            call()
    run.close()
    assert not run.folder.exists()


@pytest.mark.slow
def test_a_program_that_cannot_be_a_job_is_refused(
    made: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"where": "slurm", "cluster": "one-process", "actor": "tiny"}
    with pytest.raises(ConfigError, match=r"one process needs no Ray"):
        made(where="slurm")
    with pytest.raises(ConfigError, match=r"got 'Slurm'"):
        made(where="Slurm")
    with pytest.raises(ConfigError, match=r'only with where="slurm"'):
        made(slurm={"nodes": 2})
    with pytest.raises(ConfigError, match=r"unknown option node; did you mean nodes\?"):
        made(**job, slurm={"node": 2})
    with pytest.raises(ConfigError, match=r"cannot be a job array"):
        made(**job, slurm={"array": "1-3"})
    with pytest.raises(ConfigError, match=r"a requeued job would start over"):
        made("trainer.resume=disable", **job)
    with pytest.raises(ConfigError, match=r"starts its own Ray cluster; remove the key"):
        made("cluster.address=10.0.0.1:6379", **job)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())  # a notebook
    with pytest.raises(ConfigError, match=r"a notebook or interactive prompt has none"):
        made(**job)


def test_in_its_job_a_program_joins_the_job_s_ray(
    made: Callable[..., hf.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDFLOW_JOB_ADDRESS", "10.0.0.1:20000")
    run = made(where="slurm", slurm={"nodes": 2}, cluster="one-process", actor="tiny")
    assert run.config.cluster.address == "10.0.0.1:20000"
    with pytest.raises(ConfigError, match=r"remove the key"):
        made("cluster.address=10.0.0.1:6379", where="slurm", cluster="one-process", actor="tiny")
