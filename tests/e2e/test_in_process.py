"""Whole runs in one process: without Ray and without a server, through the same loop; checkpoint,
resume, export."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.evaluated import evaluates_as_it_validated, is_served
from tests.e2e.forked import ForkedRun
from tests.e2e.in_process import numbers, train
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow

STEPS = 3


def test_a_run_in_one_process_and_its_resumption(tmp_path: Path, settings: list[str]) -> None:
    """A run that goes on after step 2 ends as the uninterrupted one does, bit for bit, in weights
    and metrics."""
    data = next(word for word in settings if word.startswith("data.prepare.out=")).partition("=")[2]
    words = [
        *settings,
        "cluster=in-process",
        f"trainer.total_steps={STEPS}",
        "trainer.save_every_steps=1",
        "trainer.max_checkpoints_to_keep=0",
        "actor.kl_loss_coef=1e-3",
        "rollout.val_samples=2",
        "rollout.val_sampling.temperature=1",
        f"data.val_sets.short.files=[{data}/test.parquet]",
        "data.val_sets.short.sampling.max_new_tokens=3",
    ]
    out, folder = train(tmp_path, words, "whole", Run)  # as a user starts it
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["restarts"] == 0
    # the engine samples with the weights that are trained
    assert 0 < summary["logprob_diff_max"] <= 1e-5 and summary["first_ppo_kl_max"] == 0
    held = summary["planned"]["bytes"]
    assert held.keys() == {"actor", "rollout"} and held["rollout"].keys() == {"weights"}
    assert held["actor"].keys() == {"weights", "gradients", "optimizer", "reference"}
    for role, part, size in (
        (role, part, size) for role, parts in held.items() for part, size in parts.items()
    ):
        assert size["planned"] == pytest.approx(size["measured"], rel=0.2), (role, part)
    assert "held-out" in out and (folder / "export" / "config.json").exists()
    for step in range(1, STEPS + 1):
        rows = read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")
        assert len(rows) == 16 and len({row["response_text"] for row in rows}) > 4
        assert all(row["response_versions"] == [[step - 1, row["response_length"]]] for row in rows)
    grown = numbers(folder)
    assert all(one["actor/grad_norm"] > 0 and "actor/ref_kl" in one for one in grown)
    replays_step_three(folder)
    half = tmp_path / "half"
    shutil.copytree(
        folder, half, ignore=shutil.ignore_patterns("summary.json", "export", "global_step_3")
    )
    (half / "checkpoints" / "latest.json").write_text(json.dumps({"folder": "global_step_2"}))
    out, _ = train(tmp_path, words, "half")
    assert "resuming from" in out and "global_step_2" in out
    assert numbers(half) == grown
    [one], [two] = ([*(at / "export").glob("*.safetensors")] for at in (folder, half))
    assert one.read_bytes() == two.read_bytes()
    assert " when the checkpoint was saved" not in out and not (half / "changes.jsonl").exists()
    goes_on_with_other_rows(half, words)
    results = evaluates_as_it_validated(folder, "--k", "1", "2")
    assert results["sets"].keys() == {"val", "val-short"}
    assert {"mean@2", "best@1", "best@2"} <= results["sets"]["val"]["statistics"].keys()
    is_served(folder, "12+34", signal.SIGTERM)


def goes_on_with_other_rows(folder: Path, words: Sequence[str]) -> None:
    """Refused, until it is asked for; then each change is named, kept and shown."""
    rows = folder.parent / "fewer.parquet"
    data = next(word for word in words if word.startswith("data.prepare.out=")).partition("=")[2]
    pq.write_table(pq.read_table(Path(data) / "train.parquet").slice(0, 20), rows)
    other = [*words, f"data.train_files=[{rows}]", "trainer.total_steps=4", "actor.optim.lr=2e-3",
             f"name={folder.name}", f"output_dir={folder.parent}"]  # fmt: skip
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    with ForkedRun(folder.parent / "refused", "train", *other) as run:
        assert run.end(120) == 2
    assert (
        "data.train_files has changed" in run.err
        and "trainer.resume_with_other_data=true" in run.err
    )
    assert str(rows) in run.err and "Traceback" not in run.err
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed <= {"driver.log"} and {*folder.glob("config*.yaml")} <= before.keys()
    out, _ = train(folder.parent, [*other[:-2], "trainer.resume_with_other_data=true"], folder.name)
    assert "actor.optim.lr was 0.003 when the checkpoint was saved, but is 0.002 now" in out
    [record] = read_jsonl(folder / "changes.jsonl")
    assert record["step"] == STEPS and {line.split()[0] for line in record["changes"]} == {
        "data.train_files", "actor.optim.lr", "trainer.total_steps"
    }  # fmt: skip
    [earlier] = {*folder.glob("config.*.yaml")} - before.keys()
    assert "lr: 0.003" in earlier.read_text() and len(numbers(folder)) == STEPS + 1
    page = (folder / "report.html").read_text()
    assert "after rl step 3: actor.optim.lr was 0.003" in page and ">changed</text>" in page


def replays_step_three(folder: Path) -> None:
    """From the dump of step 3 and the checkpoint of step 2 come the same metrics and weights, bit
    for bit."""
    with ForkedRun(folder.parent / "refused-replay", "replay", str(folder), "3") as run:
        assert run.end(120) == 2 and "reward.path=" in run.err and "pass --run-code" in run.err
    words = ("replay", str(folder), "3", "--run-code")
    with ForkedRun(folder.parent / "output-replay", *words) as run:
        assert run.end(120) == 0, run.out + run.err
    of_replay = folder / "replay" / "step_000003"
    table = run.out.partition("step 3 of")[2]
    for name in ("old_log_probs", "ref_log_probs", "advantages"):
        assert any(
            line.split()[0] == name and line.split()[2] == "0" for line in table.splitlines()[2:]
        ), table
    assert "metrics are identical\n" in table
    of_generation = {"rollout/restarts", "trainer/restarts"}
    [replayed] = numbers(of_replay)
    wanted = numbers(folder)[2]
    assert {
        k: v for k, v in replayed.items() if k not in of_generation and not k.startswith("sync/")
    } == {k: v for k, v in wanted.items() if k not in of_generation and not k.startswith("sync/")}
    weights, again = (at / "checkpoints" / "global_step_3" / "policy" for at in (folder, of_replay))
    files = [
        path.relative_to(weights)
        for path in weights.rglob("*")
        if path.suffix != ".json" and path.is_file()
    ]
    assert files and all(
        (weights / name).read_bytes() == (again / name).read_bytes() for name in files
    )


@pytest.mark.full
def test_rollouts_alone_are_trained_on_by_ranks_of_their_own(
    tmp_path: Path, settings: list[str]
) -> None:
    """What one process generated is trained on with Ray, without engines."""
    _, folder = train(
        tmp_path, [*settings, "cluster=in-process", "trainer.rollout_only=true"], "rollouts"
    )
    # lost ranks start there again
    saved = [path.name for path in (folder / "checkpoints").glob("global_step_*")]
    assert saved == ["global_step_0"] and not (folder / "export").exists()
    words = [
        *settings,
        "name=trained",
        f"output_dir={tmp_path}",
        f"trainer.rollouts_from={folder / 'rollouts'}",
        "rollout.logprob_diff_bound=null",
    ]
    with Run(tmp_path / "output-trained", "train", *words) as run:
        assert run.end(300) == 0, run.out + run.err
        assert not any("sglang" in name for name in run.seen.values())
    first, second = numbers(tmp_path / "trained")
    assert first["actor/grad_norm"] > 0 and first["rollout/logprob_diff/mean"] <= 1e-5
    # sampled with the first weights, trained on with the second
    assert second["rollout/logprob_diff/mean"] > 1e-4


@pytest.mark.full
def test_an_asynchronous_run_goes_on_with_the_answers_that_it_had(
    tmp_path: Path, settings: list[str]
) -> None:
    """Answers of older weights, which the present ones would make otherwise: resumed, a run is bit
    for bit the same."""
    words = [
        *settings,
        "cluster=in-process",
        f"trainer.total_steps={STEPS}",
        "trainer.save_every_steps=1",
        "trainer.max_checkpoints_to_keep=0",
        "trainer.max_staleness=2",
        "trainer.steps_ahead=2",
        "trainer.val_before_train=false",
        "actor.rollout_correction.weight=token",
        "trainer.export=false",
    ]
    _, folder = train(tmp_path, words, "whole")
    grown = numbers(folder)
    assert [one["rollout/staleness/max"] for one in grown] == [0, 1, 2]
    half = tmp_path / "half"
    shutil.copytree(folder, half, ignore=shutil.ignore_patterns("summary.json", "global_step_[23]"))
    assert (half / "checkpoints" / "global_step_1" / "rollouts.parquet").exists()
    (half / "checkpoints" / "latest.json").write_text(json.dumps({"folder": "global_step_1"}))
    train(tmp_path, words, "half")
    assert numbers(half) == grown


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        ("model=tiny-dense", "~model.hf_config.moe_intermediate_size", "actor.backend=fsdp",
         "actor.parallel.distributed_optimizer=true"),
        ("algorithm=ppo", "+critic=tiny", "actor.ppo_epochs=2", "actor.old_log_probs=engine"),
    ],
    ids=["fsdp", "ppo"],
)  # fmt: skip
def test_other_backends_and_roles_in_one_process(
    tmp_path: Path, settings: list[str], words: Sequence[str]
) -> None:
    _, folder = train(tmp_path, [*settings, *words, "cluster=in-process"], "run")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and 0 < summary["logprob_diff_max"] <= 1e-5


# `hybridflow ...` for each name, with the words that follow it up to the next one
ONE_AFTER_ANOTHER = """
import sys
from hybridflow.cli.main import main
words = sys.argv[1:]
jobs = " ".join(words).split(" / ")
for job in jobs[1:]:
    assert main([*jobs[0].split(), *job.split()]) == 0, job
"""


@pytest.mark.full  # the notebooks and the program of test_python.py have runs that follow each other
def test_runs_follow_each_other_in_one_process(tmp_path: Path, settings: list[str]) -> None:
    """As in a notebook: the third run is the first one again, bit for bit, whatever the second one
    was."""
    words = [
        *settings,
        "cluster=in-process",
        f"output_dir={tmp_path}",
        "data.train_batch_size=2",
        "rollout.n=2",
        "trainer.val_before_train=false",
    ]
    ppo = ["algorithm=ppo", "+critic=tiny", "seed=7", "model.hf_config.num_hidden_layers=3"]
    jobs = ["/", "name=first", "/", "name=other", *ppo, "/", "name=again"]
    command = (sys.executable, "-c", ONE_AFTER_ANOTHER, "train")
    with Run(tmp_path / "output", *words, *jobs, command=command) as run:
        assert run.end(240) == 0, run.out + run.err
        assert run.left_behind() == []
    assert numbers(tmp_path / "first") == numbers(tmp_path / "again") != numbers(tmp_path / "other")
    [one], [two] = (
        [*(tmp_path / name / "export").glob("*.safetensors")] for name in ("first", "again")
    )
    assert one.read_bytes() == two.read_bytes()
