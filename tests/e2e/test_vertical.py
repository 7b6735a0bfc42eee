"""The whole vertical, as a user starts it: TP 2 x PP 2 x EP 2 Megatron ranks, two SGLang engines,
warm start, two GRPO steps, export."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.config.load import load_config
from hybridflow.data.dataset import PromptDataset
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.observe.joined_timeline import busy_seconds, join, lanes
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.metric_names import line_of
from hybridflow.observe.rollouts import read_rollouts
from hybridflow.observe.trackers.base import RESERVED
from tests.dist.harness.ranks import run_ranks
from tests.e2e.runs import LOOPBACK, Run

pytestmark = pytest.mark.slow
SUMMARY = {
    "seed",
    "layout",
    "score_before",
    "score_after",
    "seconds_sft",
    "seconds_grpo",
    "seconds_total",
    "logprob_diff_mean",
    "logprob_diff_max",
    "first_ppo_kl_max",
    "steps",
    "restarts",
    "engine_restarts",
    "planned",
    "exported_to",
    "flow",
}


HANGS = """
import time
from hybridflow.observe.trackers.base import tracker

@tracker("hangs")
class Hangs:
    def __init__(self, run_dir): ...
    def truncate_after(self, phase, step): ...
    def log(self, step, phase, wall_time, metrics):
        while phase == "train":
            time.sleep(3600)
    def close(self): ...
"""


@dataclass
class Finished:
    """A run that has ended."""

    run: Run
    folder: Path
    exit_code: int
    left: list[str]

    def records(self, phase: str) -> list[dict[str, Any]]:
        return [
            record
            for record in read_jsonl(self.folder / "metrics.jsonl")
            if record["phase"] == phase
        ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Iterator[Finished]:
    out = tmp_path_factory.mktemp("vertical")
    # two updates a step, a reference, an entropy term: all of the loss is in use
    (out / "hangs.py").write_text(HANGS)
    words = [
        f"trainer.loggers=[console,jsonl,tensorboard,{out}/hangs.py:hangs]",
        "trainer.tracker_timeout_s=2",
        "actor.ppo_mini_batch_size=2",
        "actor.kl_loss_coef=0.01",
        "actor.entropy_coef=0.001",
        "trainer.profile={steps: [2], ranks: [3]}",
        f"output_dir={out}",
    ]
    with Run(out / "output", "train", *settings, *words) as run:
        exit_code = run.end(400)
        yield Finished(run, out / "e2e", exit_code, run.left_behind())


def test_it_ends_well_and_leaves_nothing_running(finished: Finished) -> None:
    assert finished.exit_code == 0, finished.run.out + finished.run.err
    assert "Traceback" not in finished.run.err
    # driver, Ray's daemons, 4 ranks, 2 engines of several processes: the test does look at
    # something
    assert len(finished.run.seen) > 15
    assert finished.left == []


def test_a_tracker_that_hangs_loses_its_own_records_alone(finished: Finished) -> None:
    lost = [line for line in finished.run.out.splitlines() if "records were lost" in line]
    # both training steps, and the validation after them; not the warm start
    assert len(lost) == 1 and "3 of 6 records were lost (train steps 1-2; val steps 2)" in lost[0]
    assert len(finished.records("train")) == 2 and len(finished.records("val")) == 2


def test_every_metric_has_a_line_and_the_names_of_verl_are_there(finished: Finished) -> None:
    records = [*read_jsonl(finished.folder / "metrics.jsonl")]
    names = {name for record in records for name in record} - RESERVED
    assert {name for name in names if line_of(name) is None} == set()
    for record in finished.records("train"):
        step = record["timing_s/step"]
        assert record["perf/time_per_step"] == step
        rate = record["perf/total_num_tokens"] / step / 4  # processes
        assert record["perf/throughput"] == pytest.approx(rate)
        assert record["training/global_step"] == record["step"] and record["training/epoch"] == 0
        assert record["engine/tokens_per_s"] > 0 and 0 < record["engine/idle_share"] < 1
        assert 0 <= record["engine/prefix_hits"] <= 1
        assert not [name for name in record if "mfu" in name]  # the peak of a CPU is not known
    validated = finished.records("val")[-1]
    core = [name for name in validated if name.startswith("val-core/arithmetic/")]
    assert [validated[name] for name in core] == [validated["val/score"]]


def test_every_socket_listens_on_loopback(finished: Finished) -> None:
    programs = {name for _, name in finished.run.listening}
    for expected in ("gcs_server", "raylet", "sglang"):
        assert any(expected in name for name in programs), programs
    assert [entry for entry in finished.run.listening if not LOOPBACK.match(entry[0])] == []


def test_all_processes_are_on_one_timeline(finished: Finished) -> None:
    found = join(finished.folder)
    assert found.missing == []
    names = [one.name for one in found.processes]
    assert names == [
        "driver",
        *(f"actor-rank{r}" for r in range(4)),
        "rollout-rank0",
        "rollout-rank1",
    ]
    steps = found.steps()
    assert list(steps) == [1, 2]
    phases = [
        s for s in found.processes[0].threads["main"] if s.step in steps and "/" not in s.name
    ]
    for step, whole in steps.items():
        parts = [s for s in phases if s.step == step and s.name != "step"]
        # a checkpoint is saved after its step
        later = {s.name for s in parts if s.start >= whole.end}
        assert later <= {"save_checkpoint"}
        inside = [s for s in parts if s.start < whole.end]
        assert all(whole.start <= s.start and s.end <= whole.end + 1e-3 for s in inside)
        # a step is its phases, up to what the driver does between them: 2%, but this one is short
        length = whole.end - whole.start
        assert length - busy_seconds(parts, whole.start, whole.end) < 0.02 * length + 0.03
    for one in found.processes:
        assert all(len(lanes(spans)) == 1 for spans in one.threads.values() if one.name != "driver")
    for one in found.processes[1:5]:
        inside = one.threads["main"]
        for step, whole in steps.items():
            [updating] = [s for s in phases if s.step == step and s.name == "update_actor"]
            # both mini-batches of the step, within the driver's phase
            called = [
                s for s in inside if s.name == "update_policy" and whole.start < s.start < whole.end
            ]
            assert called and all(updating.start < s.start and s.end < updating.end for s in called)
        assert "write checkpoint" in {s.name for s in one.threads["checkpoint"]}
    counted = found.processes[0].counters
    assert {"requests of engine-0", "requests of engine-1", "reward calls"} <= counted.keys()
    assert all(values[-1][1] == 0 < max(v for _, v in values) for values in counted.values())


def test_only_the_asked_rank_and_step_are_profiled(finished: Finished) -> None:
    written = sorted(
        path.relative_to(finished.folder) for path in finished.folder.glob("profile/*/*")
    )
    assert written == [Path("profile/step_000002/actor-rank3.json.gz")]
    with gzip.open(finished.folder / written[0]) as text:
        named = {event.get("name") for event in json.load(text)["traceEvents"]}
    assert "aten::mm" in named


def test_the_summary_has_every_number(finished: Finished) -> None:
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary.keys() == SUMMARY
    assert (summary["seed"], summary["steps"], Path(summary["exported_to"])) == (
        1,
        2,
        finished.folder / "export",
    )
    assert summary["layout"].startswith("TP2·PP2·EP2·DP1·SP")
    assert all(math.isfinite(value) for value in summary.values() if isinstance(value, float))
    assert 0 < summary["seconds_grpo"] + summary["seconds_sft"] < summary["seconds_total"]
    assert 0 < summary["logprob_diff_mean"] <= 1e-4
    assert summary["logprob_diff_mean"] <= summary["logprob_diff_max"]
    assert 0 <= summary["first_ppo_kl_max"] <= 1e-6


def test_engines_and_trainer_agree_at_every_step(finished: Finished) -> None:
    steps = finished.records("train")
    index = finished.folder / "export" / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["metadata"]["total_size"]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        # the weights do change, so old weights in an engine would show
        assert record["actor/grad_norm"] > 1e-3
        assert 0 < record["rollout/logprob_diff/mean"] <= 1e-4
        assert abs(record["actor/first_ppo_kl"]) <= 1e-6
        # of the second update: its weights are no longer those of the samples
        assert record["actor/ppo_kl"] != 0
        assert record["actor/skipped_updates"] == 0
        assert (
            record["sync/engines_stale"] == 0
            and 0 < record["sync/seconds"] < record["timing_s/step"]
        )
        # both engines hold all of the model once: no byte travels twice
        assert record["sync/bytes"] == 2 * weights
    assert steps[0]["actor/ref_kl"] == 0 and steps[1]["actor/ref_kl"] != 0
    assert [record["step"] for record in finished.records("sft")] == [1, 2]
    assert [record["step"] for record in finished.records("val")] == [0, 2]


def test_every_rollout_tells_the_weights_it_came_from(finished: Finished) -> None:
    for folder, step, version, rows in (
        ("rollouts", 1, "0", 16),
        ("rollouts", 2, "1", 16),
        ("validation", 0, "0", 8),
        ("validation", 2, "2", 8),
    ):
        dump = read_rollouts(finished.folder / folder / f"step_{step:06d}.parquet")
        assert len(dump) == rows
        assert {row["weight_version"] for row in dump} == {version}, (folder, step)
        assert all(
            row["response_versions"] == [[int(version), row["response_length"]]] for row in dump
        )
        assert all(0 < row["response_length"] <= 16 for row in dump)
    rollouts = read_rollouts(finished.folder / "rollouts" / "step_000001.parquet")
    # four samples of one prompt, advantages relative to each other
    for uid in {row["uid"] for row in rollouts}:
        group = [row for row in rollouts if row["uid"] == uid]
        assert len(group) == 4 and len({row["prompt_text"] for row in group}) == 1
        assert abs(sum(row["advantage"] for row in group)) < 1e-4


def test_the_exported_folder_is_what_megatron_holds(finished: Finished) -> None:
    """The last checkpoint in four Megatron ranks against the exported folder in transformers, on
    the 64 held-out prompts."""
    from transformers import AutoModelForCausalLM

    config = load_config("config", (), finished.folder)
    tokenizer = load_tokenizer(finished.folder / "export")
    held_out = PromptDataset(config.data.val_files, tokenizer, config.data)
    assert len(held_out) == 64
    batch = held_out.batch(np.arange(64))
    prompts = [batch.jagged("prompt_ids").row(i).tolist() for i in range(64)]
    responses = [[*tokenizer.encode(batch["ground_truth"][i]), tokenizer.eos_id] for i in range(64)]
    hf_config = json.loads((finished.folder / "export" / "config.json").read_text())
    checkpoint = finished.folder / "checkpoints" / "global_step_2" / "policy"
    parallel = {"tensor": 2, "pipeline": 2, "expert": 2, "sequence": True}
    arguments = {
        "parallel": parallel,
        "hf": hf_config,
        "checkpoint": str(checkpoint),
        "prompts": prompts,
        "responses": responses,
    }
    found = run_ranks(4, "tests.dist.cases.mcore:log_probs_of_checkpoint", **arguments)
    megatron = next(values for values in found if values)

    model = AutoModelForCausalLM.from_pretrained(
        finished.folder / "export", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for prompt, response, of_megatron in zip(prompts, responses, megatron, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        np.testing.assert_allclose(of_megatron, expected.numpy(), rtol=0, atol=1e-5)


def test_the_report_stands_alone(finished: Finished) -> None:
    report = (finished.folder / "report.html").read_text()
    assert "<svg" in report and "logprob" in report.lower()
    assert not re.search(
        r"<(script|link|img|iframe)[^>]*(src|href)\s*=\s*[\"']?(?!data:|#)", report
    )
    assert not re.search(r"@import|url\(\s*[\"']?(?!data:|#)", report)


def test_the_run_folder_is_complete(finished: Finished) -> None:
    for name in (
        "config.yaml",
        "environment.json",
        "timeline.jsonl",
        "hybridflow.log",
        "export/model.safetensors.index.json",
        "export/tokenizer.json",
    ):
        assert (finished.folder / name).stat().st_size > 0, name
    for log in ("actor-rank3.log", "rollout-rank1.log", "engine-0.log", "engine-1.log"):
        assert (finished.folder / "logs" / log).exists(), log
    assert list((finished.folder / "tensorboard").glob("events*"))
    assert json.loads((finished.folder / "checkpoints" / "latest.json").read_text()) == {
        "folder": "global_step_2"
    }
