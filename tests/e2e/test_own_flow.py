"""An algorithm in a file of the user's: GRPO under a constraint on the length, whose multiplier is
learned beside the policy (the dual ascent of Safe RLHF, arXiv 2310.12773), on ranks of TP 2 and PP 2."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
STEPS = 5
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> tuple[Path, Path]:
    """A run that is killed and resumed, and one that goes through; answers are greedy."""
    out = tmp_path_factory.mktemp("flow")
    (out / "constrained.py").write_text(FLOW)

    def words(name: str) -> list[str]:
        return [
            *settings,
            f"output_dir={out}",
            f"name={name}",
            "algorithm.flow=constrained.py:constrained",
            f"trainer.total_steps={STEPS}",
            "trainer.save_every_steps=1",
            "trainer.max_checkpoints_to_keep=0",
            "cluster.procs_per_node=4",
            "actor.parallel.tensor=2",
            "actor.parallel.pipeline=2",
            "actor.parallel.expert=1",
            "rollout.n=2",
            "actor.kl_loss_coef=1e-3",
        ]

    killed = out / "killed"
    with Run(out / "output", "train", *words("killed"), cwd=out) as run:
        run.wait_for(lambda: 2 in multipliers(killed))
        run.send(signal.SIGKILL)
        run.end(60)
    for name in ("killed", "whole"):
        with Run(out / "output", "train", *words(name), cwd=out) as run:
            assert run.end(300) == 0, run.out + run.err
    return killed, out / "whole"


def test_the_multiplier_follows_the_cost(folders: tuple[Path, Path]) -> None:
    found = multipliers(folders[1])
    assert sorted(found) == list(range(1, STEPS + 1)) and found[1] > 0
    assert len(set(found.values())) == STEPS


def test_a_killed_run_has_the_state_of_its_steps(folders: tuple[Path, Path]) -> None:
    killed = multipliers(folders[0])
    assert sorted(killed) == list(range(1, STEPS + 1))
    steps = [
        json.loads(line)["step"]
        for line in (folders[0] / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["phase"] == "train"
    ]
    assert steps == list(range(1, STEPS + 1))
    differences = [killed[step + 1] - killed[step] for step in range(1, STEPS)]
    assert all(abs(difference) <= 0.5 * 0.75 + 1e-9 for difference in differences)
