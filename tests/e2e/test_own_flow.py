"""An algorithm in a file of the user's: GRPO under a constraint on the length, whose multiplier is
learned beside the policy (the dual ascent of Safe RLHF, arXiv 2310.12773), in a run that is killed
and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
STEPS = 6
PLACES: dict[str, tuple[type[Run], list[str]]] = {
    "in-process": (ForkedRun, ["cluster=in-process"]),
    "tp2-pp2": (
        Run,
        [
            "cluster.procs_per_node=4",
            "actor.parallel.tensor=2",
            "actor.parallel.pipeline=2",
            "actor.parallel.expert=1",
        ],
    ),
}
FLOW = """
from hybridflow import flow


@flow("constrained", roles=("policy", "reference"))
async def constrained(run):
    async for step in run.steps():
        batch = await run.samples()
        multiplier = run.state.get("multiplier", 0.0)
        cost = (batch.lengths("response_ids") > 4).astype("float32")
        batch = batch.with_columns(scores=(batch["scores"] - multiplier * cost).astype("float32"))
        run.state["multiplier"] = max(0.0, multiplier + 0.5 * (float(cost.mean()) - 0.25))
        batch = await run.all(run.policy.log_probs(batch), run.reference.log_probs(batch))
        batch = run.advantages(batch)
        await run.policy.update(batch)
        await run.sync()
"""


def multipliers(folder: Path) -> dict[int, float]:
    """By step, of every checkpoint."""
    found = {}
    for path in folder.glob("checkpoints/global_step_*/driver.json"):
        kept = json.loads(path.read_text())
        if kept["step"]:
            found[kept["step"]] = kept["state"]["flow"]["multiplier"]
    return found


@pytest.mark.parametrize("place", ["in-process", pytest.param("tp2-pp2", marks=pytest.mark.full)])
def test_a_killed_run_has_the_multiplier_of_its_steps(
    tmp_path: Path, settings: list[str], place: str
) -> None:
    (tmp_path / "constrained.py").write_text(FLOW)
    run_of, layout = PLACES[place]
    words = [
        *settings,
        *layout,
        f"output_dir={tmp_path}",
        "algorithm.flow=constrained.py:constrained",
        f"trainer.total_steps={STEPS}",
        "trainer.save_every_steps=1",
        "trainer.max_checkpoints_to_keep=0",
        "rollout.n=2",
        "actor.kl_loss_coef=1e-3",
    ]
    folder = tmp_path / "e2e"
    with run_of(tmp_path / "output", "train", *words, cwd=tmp_path) as run:
        run.wait_for(lambda: 2 in multipliers(folder))
        run.send(signal.SIGKILL)
        assert run.end(60) == -signal.SIGKILL
    with run_of(tmp_path / "output", "train", *words, cwd=tmp_path) as run:
        assert run.end(300) == 0, run.out + run.err
    found = multipliers(folder)
    assert sorted(found) == list(range(1, STEPS + 1)) and found[1] > 0
    assert len(set(found.values())) > 1
    steps = [one["step"] for one in read_jsonl(folder / "metrics.jsonl") if one["phase"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    multiplier = 0.0
    for step in range(1, STEPS + 1):
        rows = read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")
        costs = [row["response_length"] > 4 for row in rows]
        multiplier = max(0.0, multiplier + 0.5 * (sum(costs) / len(costs) - 0.25))
        assert found[step] == pytest.approx(multiplier), step
