"""Proximal policy optimisation with a critic (arXiv 1707.06347)."""

from __future__ import annotations

from hybridflow.flows.base import Run, flow


@flow("ppo", roles=("policy", "critic", "reference", "reward_model", "teacher"))
async def ppo(run: Run) -> None:
    """A token is compared with the value that the critic expects."""
    async for _ in run.steps():
        batch = await run.samples()
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
            run.teacher.log_probs(batch),
            run.critic.values(batch),
        )
        batch = run.advantages(batch)
        # beside the policy's, and into the next generation, where it has devices of its own
        run.later(run.critic.update(batch))
        await run.policy.update(batch)
        await run.sync()
