"""Generation without training (`trainer.rollout_only`): answers and their scores are dumped."""

from __future__ import annotations

from hybridflow.flows.base import Run, flow


@flow("rollouts", roles=("policy", "reward_model"))
async def rollouts(run: Run) -> None:
    """Generate and score answers without changing the policy."""
    async for _ in run.steps():
        batch = await run.samples()
        await run.all(run.reward_model.scores(batch))
