"""Several trained policies of a user's flow: each with ranks and engines of its own, killed and
resumed, and what of it is refused before the start."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.in_process import numbers, train
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow

# The policy learns from the rows; the tester learns to write what has a "1" in it.
TESTED = """
import numpy as np
from hybridflow import flow


@flow("tested", roles=("policy", "tester"))
async def tested(run):
    async for _ in run.steps():
        batch = await run.samples()
        tests = await run.tester.generate(["1+2=", "30+4="])
        batch = run.advantages(await run.policy.log_probs(batch))
        right = np.array(["1" in text for text in tests["response_text"]], np.float32)
        tests = await run.tester.log_probs(tests.with_columns(scores=right))
        tests = run.tester.advantages(tests)
        await run.policy.update(batch)
        await run.tester.update(tests)
        await run.sync()
"""
# Longer answers than the opponent's win; it becomes the policy every second step.
PLAYED = """
import numpy as np
from hybridflow import flow


@flow("played", roles=("policy", "opponent"))
async def played(run):
    async for step in run.steps():
        prompts = ["1+2=", "3+4=", "5+6=", "7+8="]
        mine = await run.policy.generate(prompts)
        theirs = await run.opponent.generate(prompts)
        lengths = mine.lengths("response_ids"), theirs.lengths("response_ids")
        mine = mine.with_columns(scores=np.array(lengths[0] > lengths[1], np.float32))
        mine = run.advantages(await run.policy.log_probs(mine))
        await run.policy.update(mine)
        run.record(won=float(mine["scores"].mean()))
        await run.sync()
        if step % 2 == 0:
            await run.opponent.take(run.policy)
"""
TESTER = "train_batch_size: 2, actor: {ppo_mini_batch_size: 2, kl_loss_coef: 1e-3}"


def computed(folder: Path) -> list[dict[str, Any]]:
    """`numbers`, without clock and memory of the tester."""
    clocks = ("tester/sync/seconds", "tester/perf/")
    return [
        {name: value for name, value in step.items() if not name.startswith(clocks)}
        for step in numbers(folder)
    ]


def weights(folder: Path) -> bytes:
    return (folder / "model-00001-of-00001.safetensors").read_bytes()


def test_two_policies_in_one_process_learn_and_go_on(tmp_path: Path, settings: list[str]) -> None:
    """Each has its samples, weights and metrics; a run that goes on after step 2 ends as one that
    goes through, bit for bit."""
    (tmp_path / "tested.py").write_text(TESTED)
    words = [
        *(*settings, "cluster=in-process", "sft.steps=0", "actor.kl_loss_coef=0"),
        f"algorithm.flow={tmp_path}/tested.py:tested",
        f"+roles={{tester: {{{TESTER}}}}}",
        *("trainer.total_steps=12", "trainer.save_every_steps=2"),
        "trainer.max_checkpoints_to_keep=0",
    ]
    _, whole = train(tmp_path, words, "whole")
    found = computed(whole)
    scores = [step["tester/critic/score/mean"] for step in found]
    assert sum(scores[-4:]) > sum(scores[:4]) + 1, scores
    # each policy's engine samples with the weights of its own ranks
    assert all(step["tester/rollout/logprob_diff/max"] < 1e-5 for step in found)
    assert all(step["rollout/logprob_diff/max"] < 1e-5 for step in found)
    assert all(step["tester/actor/grad_norm"] >= 0 for step in found)
    assert weights(whole / "export") != weights(whole / "export-tester")
    texts = read_rollouts(whole / "rollouts-tester" / "step_000012.parquet")
    assert len(texts) == 8 and {row["score"] for row in texts} <= {0.0, 1.0}

    half = tmp_path / "half"
    shutil.copytree(
        whole,
        half,
        ignore=shutil.ignore_patterns(
            "summary.json", "export*", "global_step_1*", "global_step_[4-9]"
        ),
    )
    (half / "checkpoints" / "latest.json").write_text(json.dumps({"folder": "global_step_2"}))
    out, _ = train(tmp_path, words, "half")
    assert "resuming from" in out
    assert computed(half) == found
    for name in ("export", "export-tester"):
        assert weights(half / name) == weights(whole / name)


@pytest.mark.full
def test_two_policies_on_one_base_are_those_on_two(tmp_path: Path, settings: list[str]) -> None:
    """With adapters, a run whose tester shares the policy's base ends as one with two copies, bit
    for bit; so does one that goes on after step 2."""
    (tmp_path / "tested.py").write_text(TESTED)
    words = [
        *(*settings, "cluster=in-process", "sft.steps=0", "actor.kl_loss_coef=0"),
        *("actor.lora.rank=4", "actor.optim.lr=5e-2"),
        f"algorithm.flow={tmp_path}/tested.py:tested",
        *("trainer.total_steps=4", "trainer.save_every_steps=2"),
        "trainer.max_checkpoints_to_keep=0",
    ]
    shared = f"+roles={{tester: {{base: policy, {TESTER}}}}}"
    _, apart = train(tmp_path, [*words, f"+roles={{tester: {{{TESTER}}}}}"], "apart")
    _, whole = train(tmp_path, [*words, shared], "whole")
    assert computed(whole) == computed(apart)
    assert computed(whole)[-1]["tester/actor/grad_norm"] > 0
    for name in ("export", "export-tester"):
        assert weights(whole / name) == weights(apart / name)
    assert weights(whole / "export") != weights(whole / "export-tester")

    half = tmp_path / "half"
    shutil.copytree(
        whole, half, ignore=shutil.ignore_patterns("summary.json", "export*", "global_step_4")
    )
    (half / "checkpoints" / "latest.json").write_text(json.dumps({"folder": "global_step_2"}))
    out, _ = train(tmp_path, [*words, shared], "half")
    assert "resuming from" in out
    assert computed(half) == computed(whole)
    for name in ("export", "export-tester"):
        assert weights(half / name) == weights(whole / name)


def played(folder: Path, settings: list[str], *given: str) -> Path:
    """The folder of a run of `PLAYED` that goes on after step 3, up to step 4."""
    (folder / "played.py").write_text(PLAYED)
    words = [
        *(*settings, "cluster=in-process", "sft.steps=0", "actor.kl_loss_coef=0", *given),
        f"algorithm.flow={folder}/played.py:played",
    ]
    train(folder, [*words, "trainer.total_steps=3"], "play")
    out, run = train(folder, [*words, "trainer.total_steps=4"], "play")
    assert "resuming from" in out and "synthetic rows" not in out
    return run


def test_an_opponent_takes_the_weights_of_the_policy(tmp_path: Path, settings: list[str]) -> None:
    folder = played(tmp_path, settings, "+roles={opponent: {frozen: true}}")
    steps = [step for step in read_jsonl(folder / "metrics.jsonl") if step["phase"] == "train"]
    assert len(steps) == 4 and all("flow/won" in step for step in steps)
    assert weights(folder / "export") == weights(folder / "export-opponent")
    policy, opponent = (
        sum(file.stat().st_size for file in (folder / "checkpoints/global_step_4" / name).iterdir())
        for name in ("policy", "opponent")
    )
    assert opponent < 0.4 * policy  # in float32, without the two moments


def test_an_opponent_on_the_policys_base_takes_its_adapters(
    tmp_path: Path, settings: list[str]
) -> None:
    roles = "+roles={opponent: {base: policy, frozen: true}}"
    folder = played(tmp_path, settings, roles, "actor.lora.rank=4", "actor.optim.lr=5e-2")
    steps = numbers(folder)
    assert len(steps) == 4 and any(step["actor/grad_norm"] > 0 for step in steps)
    assert weights(folder / "export") == weights(folder / "export-opponent")
    assert not list((folder / "model" / "opponent").glob("taken*"))  # no weights were written


@pytest.mark.full
def test_policies_of_other_layouts_over_ray_killed_and_resumed(
    tmp_path: Path, settings: list[str]
) -> None:
    """The first on ranks of TP 2 and PP 2, the tester on two data-parallel ones; with greedy
    answers a killed run ends as one that goes through."""
    (tmp_path / "tested.py").write_text(TESTED)
    layout = "parallel: {tensor: 1, pipeline: 1, expert: 1, sequence: false}"
    tester = TESTER.replace("actor: {", f"actor: {{{layout}, ")

    def words(name: str) -> list[str]:
        return [
            *(*settings, f"output_dir={tmp_path}", f"name={name}", "sft.steps=0"),
            "actor.kl_loss_coef=0",
            f"algorithm.flow={tmp_path}/tested.py:tested",
            f"+roles={{tester: {{procs: 2, {tester}, rollout: {{num_engines: 1}}}}}}",
            *("trainer.total_steps=4", "trainer.save_every_steps=1", "rollout.sampling.top_k=1"),
            "rollout.logprob_diff_bound=null",
        ]

    killed = tmp_path / "killed"
    with Run(tmp_path / "output", "train", *words("killed")) as run:
        run.wait_for((killed / "checkpoints" / "global_step_2").exists)
        run.send(signal.SIGKILL)
        run.end(60)
    for name in ("killed", "whole"):
        with Run(tmp_path / "output", "train", *words(name)) as run:
            assert run.end(300) == 0, run.out + run.err
    for name in ("export", "export-tester"):
        assert weights(killed / name) == weights(tmp_path / "whole" / name)


@pytest.mark.full
def test_policies_on_one_base_over_ray_killed_and_resumed(
    tmp_path: Path, settings: list[str]
) -> None:
    """Both on the same ranks of TP 2, with engines of their own; with greedy answers a killed run
    ends as one that goes through."""
    (tmp_path / "tested.py").write_text(TESTED)

    def words(name: str) -> list[str]:
        return [
            *(*settings, f"output_dir={tmp_path}", f"name={name}", "sft.steps=0"),
            *("actor.kl_loss_coef=0", "actor.lora.rank=4", "actor.optim.lr=5e-2"),
            *("cluster.procs_per_node=2", "actor.parallel.pipeline=1", "rollout.num_engines=1"),
            f"algorithm.flow={tmp_path}/tested.py:tested",
            f"+roles={{tester: {{base: policy, {TESTER}}}}}",
            *("trainer.total_steps=4", "trainer.save_every_steps=1", "rollout.sampling.top_k=1"),
            # greedy answers of a group have no advantages
            *("rollout.logprob_diff_bound=null", "actor.entropy_coef=0.01"),
        ]

    killed = tmp_path / "killed"
    with Run(tmp_path / "output", "train", *words("killed")) as run:
        run.wait_for((killed / "checkpoints" / "global_step_2").exists)
        run.send(signal.SIGKILL)
        run.end(60)
    for name in ("killed", "whole"):
        with Run(tmp_path / "output", "train", *words(name)) as run:
            assert run.end(300) == 0, run.out + run.err
    for name in ("export", "export-tester"):
        assert weights(killed / name) == weights(tmp_path / "whole" / name)
    assert weights(killed / "export") != weights(killed / "export-tester")
