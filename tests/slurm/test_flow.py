"""A flow in a file of the user's, as a job over two nodes: through `hybridflow slurm submit`, and
through `sbatch` with the script that `render` writes."""

from __future__ import annotations

import json

import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.slurm.jobs import TWO_NODES, Jobs, left_behind

pytestmark = [pytest.mark.slow, pytest.mark.full]
FLOW = """
from hybridflow import flow


@flow("limited", roles=("policy", "reference"))
async def limited(run):
    async for step in run.steps():
        batch = await run.samples()
        multiplier = run.state.get("multiplier", 1.0)
        cost = (batch.lengths("response_ids") > 4).astype("float32")
        batch = batch.with_columns(scores=(batch["scores"] - multiplier * cost).astype("float32"))
        run.state["multiplier"] = multiplier + 0.5
        run.record(multiplier=multiplier)
        batch = await run.all(run.policy.log_probs(batch), run.reference.log_probs(batch))
        batch = run.advantages(batch)
        await run.policy.update(batch)
        await run.sync()
"""
WORDS = ("algorithm.flow=mine/limited.py:limited", "trainer.save_every_steps=1")


def followed(jobs: Jobs, job: str, name: str, steps: int) -> None:
    """The job ends, and its run has followed the flow for so many steps."""
    assert jobs.end(job) == "COMPLETED", jobs.logs(job)
    folder = jobs.folder / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["flow"] == WORDS[0].partition("=")[2]
    records = [one for one in read_jsonl(folder / "metrics.jsonl") if one["phase"] == "train"]
    found = [(one["step"], one["flow/multiplier"]) for one in records]
    assert found == [(step, 0.5 + 0.5 * step) for step in range(1, steps + 1)]
    assert left_behind(job) == []


def test_a_flow_of_the_users_is_submitted_refused_and_resumed(jobs: Jobs) -> None:
    """The file's path is relative to the folder of the command, which is the job's too."""
    (jobs.folder / "mine").mkdir()
    file = jobs.folder / "mine" / "limited.py"
    name = "own flow"
    given = ("--config-name", "e2e", *jobs.settings, *TWO_NODES, f"name={name}", *WORDS)
    file.write_text(FLOW.replace("await run.samples()", "await run.samples("))
    said = jobs.run("submit", *given, "trainer.total_steps=2", status=2)
    assert "mine/limited.py" in said and "SyntaxError: '(' was never closed (line 8)" in said
    file.write_text(FLOW)
    job = jobs.submit(name, *jobs.recipe("own-flow", 2), *WORDS)
    followed(jobs, job, name, 2)

    script = jobs.folder / "job.sbatch"
    script.write_text(jobs.run("render", *given, "trainer.total_steps=3"))
    job = jobs.cluster.ask("sbatch", "--parsable", f"--chdir={jobs.folder}", str(script))
    followed(jobs, job, name, 3)
