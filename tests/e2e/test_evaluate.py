"""`hybridflow eval` and `serve` of runs with engines in separate processes, of other backends, and of
folders without a run. One in a single process is in `test_in_process`."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.evaluated import evaluates_as_it_validated, evaluation, is_served, validated
from tests.e2e.in_process import train
from tests.e2e.runs import Run, pid_of

pytestmark = [pytest.mark.slow, pytest.mark.full]

SHORT = ["sft=none", "trainer.total_steps=1", "data.val_max_prompts=32"]


def words_of(settings: list[str], key: str) -> str:
    [found] = [word.partition("=")[2] for word in settings if word.startswith(f"{key}=")]
    return found


def test_engines_of_their_own_evaluate_as_those_of_the_run(
    tmp_path: Path, settings: list[str]
) -> None:
    words = [*settings, *SHORT, "reward=builtin", "~reward.path", f"output_dir={tmp_path}"]
    with Run(tmp_path / "output", "train", *words, "name=run") as run:
        assert run.end(300) == 0, run.out + run.err
    folder = tmp_path / "run"
    results = evaluates_as_it_validated(folder)
    assert results["sets"]["val"]["prompts"] == 32
    card = (folder / "export" / "README.md").read_text()
    assert "## Evaluation" in card and "weights after step 1." in card
    # a copy of the export knows no run
    shutil.copytree(folder / "export", tmp_path / "model")
    data = Path(words_of(settings, "data.prepare.out")) / "test.parquet"
    limits = ["data.max_prompt_length=16", "data.max_response_length=8", "data.val_max_prompts=32"]
    _, again = evaluation(tmp_path / "other", str(tmp_path / "model"), "--data", str(data), *limits)
    assert again["metrics"] == validated(folder)
    _, here = evaluation(
        tmp_path / "here", str(folder), "rollout.engine=hf", "--out", str(tmp_path / "out")
    )
    assert here["metrics"].keys() == again["metrics"].keys()
    text = is_served(folder, "12+34", signal.SIGINT)
    assert text == is_served(folder, "12+34", signal.SIGTERM, "rollout.num_engines=1")


def test_an_engine_that_dies_costs_time_alone(tmp_path: Path, settings: list[str]) -> None:
    words = [*settings, *SHORT, "cluster=in-process", "rollout.val_samples=1"]
    _, folder = train(tmp_path, words, "run")
    expected = evaluates_as_it_validated(folder)
    many = ["rollout.engine=sglang", "data.val_max_prompts=64", "rollout.val_samples=64"]
    warm = ["rollout.val_sampling.temperature=1", "data.max_response_length=64"]
    out = tmp_path / "killed"
    with Run(
        tmp_path / "o", "eval", str(folder), "--run-code", "--out", str(out), *many, *warm
    ) as run:
        run.wait_for(lambda: "first answer" in run.out)
        psutil.Process(pid_of(run, out / "logs" / "engine-0.log")).kill()
        assert run.end(240) == 0, run.out + run.err
        assert run.left_behind() == []
    assert (out / "logs" / "engine-0.1.log").exists()
    assert expected["sets"]["val"]["answers_per_prompt"] == 1


def test_a_policy_of_fsdp_is_evaluated(tmp_path: Path, settings: list[str]) -> None:
    dense = ("model=tiny-dense", "~model.hf_config.moe_intermediate_size", "actor.backend=fsdp",
             "actor.parallel.distributed_optimizer=true", "cluster=in-process")  # fmt: skip
    _, folder = train(tmp_path, [*settings, *SHORT, *dense], "run")
    evaluates_as_it_validated(folder)


def test_a_data_set_that_cannot_be_scored_is_one_message(
    tmp_path: Path, settings: list[str]
) -> None:
    _, folder = train(tmp_path, [*settings, *SHORT, "cluster=in-process"], "run")
    prompt = [{"role": "user", "content": "1+1"}]
    rows = [{"data_source": "nobodys", "prompt": prompt, "reward_model": {"ground_truth": "2"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "strange.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "empty.parquet")
    (tmp_path / "text.jsonl").write_text("{")
    for file, extra, said in (
        ("strange.parquet", ["reward.path=null"], "no verifier for data_source 'nobodys'"),
        ("empty.parquet", [], "column 'prompt'"),
        ("text.jsonl", [], "text.jsonl, line 1: not valid JSON"),
        ("gone.parquet", [], "does not exist; check the path"),
    ):
        words = ["--run-code", "--data", str(tmp_path / file), *extra]
        out, _ = evaluation(tmp_path / "bad", str(folder), *words, exit_code=2)
        assert said in out and "has changed" not in out, out
    assert not (folder / "eval").exists()
