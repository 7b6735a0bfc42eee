"""A reward model is trained, then PPO runs with it and a critic: in the policy's processes, and in
its own; stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.timeline import read_timeline
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
SMALL = ("actor=tiny", "cluster=one-process", "rollout=tiny", "rollout.max_total_tokens=4096")
# The score is a property of the prompt: whatever the policy does, a critic can learn to foresee it.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return extra_info["a"] / 99
"""
# Answers are the most likely ones, so that a run can be repeated to the last digit (the engines'
# own randomness is not restored).
OFFLOAD = "{weights: true, gradients: true, optimizer: true}"
GREEDY = ("rollout.sampling.top_k=1", "rollout.logprob_diff_bound=null", "rollout.n=2")
SAME = (
    "critic/vf_loss",
    "critic/values/mean",
    "critic/grad_norm",
    "critic/lr",
    "critic/returns/mean",
    "actor/grad_norm",
    "actor/pg_loss",
)
SAME += ("actor/kl_loss", "actor/ref_kl")


def records(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == phase]


def finished(out: Path, command: str, *words: str, run_of: type[Run] = Run) -> Run:
    with run_of(out / "output", command, *words, f"output_dir={out}") as run:
        assert run.end(400) == 0, run.out + run.err
        assert run.left_behind() == []
        return run


@pytest.fixture(scope="module")
def base(
    tmp_path_factory: pytest.TempPathFactory, settings: list[str]
) -> Iterator[tuple[Path, list[str]]]:
    """A folder with a trained reward model in `reward/export`, and the words that every run here
    starts with."""
    out = tmp_path_factory.mktemp("ppo")
    (out / "reward.py").write_text(REWARD)
    kept = [word for word in settings if not word.startswith(("data.prepare.out", "reward.path"))]
    pairs = [
        f"data.prepare.out={out / 'data'}",
        "data.prepare.options.num_pairs=200",
        f"reward.path={out / 'reward.py'}",
    ]
    words = [*kept, *pairs, *SMALL]
    settings_of_pairs = [
        "+reward_training=arithmetic",
        "reward_training.steps=8",
        "reward_training.batch_size=32",
    ]
    finished(
        out,
        "train-reward",
        *words,
        *settings_of_pairs,
        "name=reward",
        "cluster.procs_per_node=2",
        "actor.parallel.pipeline=2",
    )
    yield (
        out,
        [
            *words,
            f"reward_model.path={out / 'reward' / 'export'}",
            "algorithm=ppo",
            "critic.max_tokens_per_micro_batch=256",
        ],
    )


def test_a_reward_model_learns_from_pairs_and_is_exported(base: tuple[Path, list[str]]) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = base[0] / "reward"
    steps = records(folder, "reward")
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert np.mean([record["reward/loss"] for record in steps[-2:]]) < np.mean(
        [record["reward/loss"] for record in steps[:2]]
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["held_out_accuracy"] > 0.55 and summary["steps"] == 8
    assert json.loads((folder / "checkpoints" / "latest.json").read_text()) == {
        "folder": "reward_step_8"
    }
    _, report = AutoModelForSequenceClassification.from_pretrained(
        folder / "export", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        report
    )


def test_a_critic_beside_the_policy_learns_to_foresee_returns(base: tuple[Path, list[str]]) -> None:
    out, words = base
    learning = [
        "critic.optim.lr=3e-3",
        "critic.ppo_epochs=2",
        "data.train_batch_size=16",
        "critic.cliprange_value=null",
    ]
    more = [
        "+critic=tiny",
        *learning,
        "trainer.total_steps=14",
        "trainer.critic_warmup=2",
        "reward_model.weight=0.01",
        "name=beside",
    ]
    more += [f"teacher.path={out / 'reward' / 'model' / 'reward-start'}", "teacher.top_k=14"]
    more += [f"{role}.offload={OFFLOAD}" for role in ("critic", "reward_model", "teacher")]
    place = [word for word in words if word not in SMALL] + [
        "cluster=in-process",
        "teacher.placement=colocated",
    ]
    finished(out, "train", *place, *more, run_of=ForkedRun)
    steps = records(out / "beside", "train")
    explained = [record["critic/vf_explained_var"] for record in steps]
    assert np.mean(explained[-3:]) > max(0.4, np.mean(explained[:3]) + 0.3), explained
    assert [("actor/loss" in record) for record in steps] == [False] * 2 + [True] * 12
    assert {"critic/vf_loss", "critic/vf_clipfrac", "reward_model/score/mean"} <= steps[0].keys()
    # both roles were off the device between their calls, and say what they took in them
    for record in steps:
        assert (
            record["perf/offloaded_gb/critic"] > 1.5 * record["perf/offloaded_gb/reward_model"] > 0
        )
        assert (
            record["perf/offloaded_gb/teacher"] > 0
            and record.get("perf/offloaded_gb/actor", 0) == 0
        )
        assert 0.5 < record["teacher/top_mass"] <= 1 + 1e-6
        assert all(
            record[f"perf/max_memory_allocated_gb/{name}"] > 0.1
            for name in ("compute_values", "update_critic", "compute_scores")
        )
    assert (out / "beside" / "checkpoints" / "global_step_14" / "critic" / "manifest.json").exists()


@pytest.mark.full
def test_critic_and_reference_of_their_own_go_on_exactly_where_they_were_stopped(
    base: tuple[Path, list[str]],
) -> None:
    """Processes of their own against the same run with both in the policy's processes, and against
    itself with a stop in between. Without checkpoints the critic's update may last into the next
    generation, with them it does not."""
    out, words = base
    common = [*words, *GREEDY, "trainer.save_every_steps=1"]
    own = [*common, "+critic=tiny-own", "reference.placement=own"]
    finished(
        out, "train", *own, "name=whole", "trainer.total_steps=4", "trainer.save_every_steps=0"
    )
    finished(out, "train", *common, "+critic=tiny", "name=colocated", "trainer.total_steps=2")
    asleep = [*own, f"critic.offload={OFFLOAD}", f"reward_model.offload={OFFLOAD}"]
    finished(out, "train", *asleep, "name=cut", "trainer.total_steps=2")
    again = finished(out, "train", *asleep, "name=cut", "trainer.total_steps=4")
    assert "resuming from" in again.out
    for name, together in (("whole", True), ("colocated", False)):
        timeline = {
            (one["name"], one["step"]): one for one in read_timeline(out / name / "timeline.jsonl")
        }
        for step in (1, 2):
            for pair in (("ref", "values"), ("update_critic", "update_actor")):
                latest = max(timeline[phase, step]["start"] for phase in pair)
                assert (latest < min(timeline[phase, step]["end"] for phase in pair)) == together, (
                    name,
                    pair,
                )
    whole, cut, colocated = (records(out / name, "train") for name in ("whole", "cut", "colocated"))
    assert [record["step"] for record in cut] == [1, 2, 3, 4]
    for name in SAME:
        np.testing.assert_allclose(
            [r[name] for r in cut], [r[name] for r in whole], rtol=1e-5, atol=1e-7, err_msg=name
        )
        np.testing.assert_allclose(
            [r[name] for r in colocated],
            [r[name] for r in whole[:2]],
            rtol=1e-4,
            atol=1e-6,
            err_msg=name,
        )
